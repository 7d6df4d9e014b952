//! Checks of objects of System V.

use super::{CONTENT_MAX, Found, ensure, in_ipc, object};
use crate::{Area, Backing, Records, SystemVHead, SystemVQueue, SystemVSemaphores, Thing};

/// LIMIT: semaphores of a set, and the value of one (semop(2): SEMMSL, SEMVMX).
const SEMAPHORES_MAX: usize = 32_000;
const VALUE_MAX: u16 = 32_767;

pub(super) fn head(head: &SystemVHead, records: &Records) -> Found {
    in_ipc(head.namespace, records)?;
    ensure(head.id >= 0, || "its id".into())?;
    ensure(head.mode <= 0o777, || "its mode".into())
}

/// Whether a process of an IPC namespace can attach all that it has attached.
pub(super) fn are_reached(areas: &[Area], ipc: Option<usize>, records: &Records) -> bool {
    areas.iter().all(|area| match area.backing {
        Backing::Shared { object: n, .. } => match object(n, records) {
            Ok(Thing::SystemVMemory(memory)) => memory.head.namespace == ipc,
            _ => true,
        },
        _ => true,
    })
}

pub(super) fn semaphores(set: &SystemVSemaphores, records: &Records) -> Found {
    head(&set.head, records)?;
    let count = (1..=SEMAPHORES_MAX).contains(&set.values.len());
    let values = set.values.iter().all(|value| *value <= VALUE_MAX);
    ensure(count && values, || "its values".into())
}

pub(super) fn queue(queue: &SystemVQueue, records: &Records) -> Found {
    head(&queue.head, records)?;
    let bytes: usize = queue.messages.iter().map(|m| m.text.0.len()).sum();
    let kinds = queue.messages.iter().all(|message| message.kind > 0);
    ensure(bytes <= CONTENT_MAX && kinds, || "its messages".into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sample::small;
    use crate::{Bytes, SystemVMessage};

    #[test]
    fn invalid_system_v_objects_are_refused() {
        let good = SystemVHead {
            id: 3,
            key: -1,
            mode: 0o600,
            uid: 0,
            gid: 0,
            creator_uid: 0,
            creator_gid: 0,
            namespace: None,
        };
        let records = small();
        let head = |it: &SystemVHead| head(it, &records);
        assert!(head(&good).is_ok());
        assert!(head(&SystemVHead { id: -1, ..good.clone() }).is_err());
        assert!(head(&SystemVHead { mode: 0o1600, ..good.clone() }).is_err());
        let said = head(&SystemVHead { namespace: Some(0), ..good.clone() });
        assert!(said.is_err_and(|said| said.contains("in no IPC namespace")));
        let with = |values| semaphores(&SystemVSemaphores { head: good.clone(), values }, &records);
        assert!(with(vec![0, VALUE_MAX]).is_ok());
        assert!(with(vec![VALUE_MAX + 1]).is_err());
        assert!(with(Vec::new()).is_err() && with(vec![0; SEMAPHORES_MAX + 1]).is_err());
        let message = |kind| SystemVMessage { kind, text: Bytes(vec![1]) };
        let with = |kind| {
            queue(&SystemVQueue { head: good.clone(), messages: vec![message(kind)] }, &records)
        };
        assert!(with(1).is_ok() && with(0).is_err() && with(-1).is_err());
    }
}
