//! Checks of POSIX message queues.

use super::{CONTENT_MAX, FILE_BYTES_MAX, Found, ensure, in_ipc};
use crate::{MessageQueue, QueuedMessage, Records};

/// The kernel's limits on the messages of a queue, the bytes of a message, and priorities.
const MESSAGES_MAX: u64 = 1 << 16;
const MESSAGE_BYTES_MAX: u64 = 16 << 20;
const PRIORITIES: u32 = 1 << 15;

pub(super) fn queue(queue: &MessageQueue, records: &Records) -> Found {
    in_ipc(queue.namespace, records)?;
    let is_name = |name: &String| {
        let is_text = !name.is_empty() && name.len() < 256 && !name.contains(['/', '\0']);
        is_text && ![".", ".."].contains(&name.as_str())
    };
    ensure(queue.name.as_ref().is_none_or(is_name), || "its name".into())?;
    ensure(queue.mode <= 0o777, || "its mode".into())?;
    let most = (1..=MESSAGES_MAX).contains(&queue.messages_max);
    let bytes = (1..=MESSAGE_BYTES_MAX).contains(&queue.message_bytes);
    ensure(most && bytes, || "its size".into())?;
    let is_length = |bytes: u64| bytes <= FILE_BYTES_MAX;
    ensure(queue.file_bytes.is_none_or(is_length), || "the length of its file".into())?;
    let fits = |one: &QueuedMessage| {
        one.data.0.len() as u64 <= queue.message_bytes && one.priority < PRIORITIES
    };
    let all: usize = queue.messages.iter().map(|one| one.data.0.len()).sum();
    let sound = queue.messages.len() as u64 <= queue.messages_max && all <= CONTENT_MAX;
    ensure(sound && queue.messages.iter().all(fits), || "its messages".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Bytes;
    use crate::sample::small;

    #[test]
    fn invalid_queues_are_refused() {
        let with = |change: fn(&mut MessageQueue)| {
            let message = QueuedMessage { priority: 3, data: Bytes(vec![0; 8]) };
            let mut it = MessageQueue {
                name: Some("a".into()),
                mode: 0o600,
                uid: 0,
                gid: 0,
                messages_max: 1,
                message_bytes: 8,
                namespace: None,
                file_bytes: None,
                messages: vec![message],
            };
            change(&mut it);
            queue(&it, &small()).err().unwrap_or_default()
        };
        type Case = (fn(&mut MessageQueue), &'static str);
        let cases: [Case; 10] = [
            (|_| {}, ""),
            (|q| q.name = None, ""),
            (|q| q.name = Some("../a".into()), "its name"),
            (|q| q.mode = 0o4600, "its mode"),
            (|q| q.namespace = Some(0), "in no IPC namespace"),
            (|q| q.messages_max = 0, "its size"),
            (|q| q.file_bytes = Some(u64::MAX), "the length of its file"),
            (|q| q.message_bytes = 7, "its messages"),
            (|q| q.messages[0].priority = 1 << 15, "its messages"),
            (|q| q.messages.push(q.messages[0].clone()), "its messages"),
        ];
        for (change, text) in cases {
            let said = with(change);
            assert!(said.contains(text) && said.is_empty() == text.is_empty(), "{text}: {said}");
        }
    }
}
