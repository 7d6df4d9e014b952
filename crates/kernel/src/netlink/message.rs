//! The bytes of netlink(7): requests, and the answers of the kernel. Pure functions.

use std::ops::Range;

/// `struct nlmsghdr`: length, kind, flags, sequence number, port.
const HEADER_BYTES: usize = 16;
/// An attribute with attributes inside (`NLA_F_NESTED`).
const NESTED: u16 = 0x8000;
/// The bits of an attribute's kind that are not flags (`NLA_TYPE_MASK`).
const KIND_MASK: u16 = 0x3fff;

/// Kinds of messages of netlink itself.
const NOTHING: u16 = 1;
const ERROR: u16 = 2;
const DONE: u16 = 3;
const OVERRUN: u16 = 4;
/// The first kind of a protocol.
const FIRST_OF_PROTOCOL: u16 = 16;

/// Flags of an answer: the table changed while it was listed (`NLM_F_DUMP_INTR`); the request is not
/// repeated in the error; attributes follow the error.
const INTERRUPTED: u16 = 0x10;
const CAPPED: u16 = 0x100;
const EXTENDED: u16 = 0x200;
/// `NLMSGERR_ATTR_MSG`: the kernel's text about an error.
const ERROR_TEXT: u16 = 1;

/// The part of a request behind the netlink header: a structure, then attributes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Message {
    bytes: Vec<u8>,
    /// An attribute or the message is longer than its length field can express.
    is_too_long: bool,
}

impl Message {
    /// A message that starts with this structure, or has none.
    pub fn new(head: &[u8]) -> Self {
        let mut bytes = head.to_vec();
        bytes.resize(head.len().next_multiple_of(4), 0);
        Self { bytes, is_too_long: false }
    }

    /// Appends an attribute.
    #[must_use]
    pub fn with(mut self, kind: u16, value: &[u8]) -> Self {
        let length = u16::try_from(value.len() + 4).unwrap_or_else(|_| {
            self.is_too_long = true;
            0
        });
        self.bytes.extend(length.to_ne_bytes());
        self.bytes.extend(kind.to_ne_bytes());
        self.bytes.extend(value);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self
    }

    /// Appends an attribute that is a text with a zero byte at the end.
    #[must_use]
    pub fn with_text(self, kind: u16, text: &str) -> Self {
        self.with(kind, &[text.as_bytes(), &[0]].concat())
    }

    /// Appends an attribute that contains the structure and the attributes of another message.
    #[must_use]
    pub fn nested(mut self, kind: u16, inner: &Self) -> Self {
        self.is_too_long |= inner.is_too_long;
        self.with(kind | NESTED, &inner.bytes)
    }

    /// The whole request; `None` if a part of it is too long.
    pub(super) fn request(&self, kind: u16, flags: u16, sequence: u32) -> Option<Vec<u8>> {
        let length = u32::try_from(HEADER_BYTES + self.bytes.len()).ok()?;
        let mut all = length.to_ne_bytes().to_vec();
        all.extend(kind.to_ne_bytes());
        all.extend(flags.to_ne_bytes());
        all.extend(sequence.to_ne_bytes());
        all.extend([0; 4]); // the port of the sender, which the kernel has from the socket
        all.extend(&self.bytes);
        (!self.is_too_long).then_some(all)
    }
}

/// The kernel's refusal of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Refusal {
    /// The error number.
    pub(super) errno: i32,
    /// The kernel's text about it, or nothing.
    pub(super) text: String,
}

impl Refusal {
    /// A request or an answer that is longer than a datagram may be.
    pub(super) fn too_long() -> Self {
        Self { errno: libc::EMSGSIZE, text: String::new() }
    }

    /// An answer that does not have the format of netlink(7).
    pub(super) fn malformed() -> Self {
        Self { errno: libc::EBADMSG, text: "the answer is malformed".into() }
    }
}

/// The answer to one request, collected from datagrams.
#[derive(Debug, Default)]
pub(super) struct Answer {
    sequence: u32,
    bytes: Vec<u8>,
    entries: Vec<Range<usize>>,
    /// The table changed while it was listed: the entries may contradict each other.
    pub(super) is_interrupted: bool,
}

impl Answer {
    /// The answer to the request with this number, without a datagram yet.
    pub(super) fn new(sequence: u32) -> Self {
        Self { sequence, ..Self::default() }
    }

    /// Adds a datagram; returns whether the answer is complete. Messages with another sequence number
    /// are left out: they answer an earlier request.
    pub(super) fn take(&mut self, datagram: &[u8]) -> Result<bool, Refusal> {
        let mut rest = datagram;
        while !rest.is_empty() {
            let (part, behind) = Part::first_of(rest).ok_or_else(Refusal::malformed)?;
            rest = behind;
            if part.sequence != self.sequence {
                continue;
            }
            self.is_interrupted |= part.flags & INTERRUPTED != 0;
            match part.kind {
                ERROR | DONE => return part.end().map(|()| true),
                OVERRUN => {
                    let text = "answers were lost".into();
                    return Err(Refusal { errno: libc::ENOBUFS, text });
                }
                NOTHING => {}
                FIRST_OF_PROTOCOL.. => {
                    let start = self.bytes.len();
                    self.bytes.extend(part.body);
                    self.entries.push(start..self.bytes.len());
                }
                _ => return Err(Refusal::malformed()),
            }
        }
        Ok(false)
    }

    /// The entries, each without the netlink header.
    pub(super) fn entries(&self) -> impl Iterator<Item = &[u8]> {
        self.entries.iter().map(|range| &self.bytes[range.clone()])
    }
}

/// One message of a datagram.
struct Part<'b> {
    kind: u16,
    flags: u16,
    sequence: u32,
    body: &'b [u8],
}

impl<'b> Part<'b> {
    /// The first message, and the bytes behind it.
    fn first_of(datagram: &'b [u8]) -> Option<(Self, &'b [u8])> {
        let length = u32_at(datagram, 0)? as usize;
        let part = Self {
            kind: u16_at(datagram, 4)?,
            flags: u16_at(datagram, 6)?,
            sequence: u32_at(datagram, 8)?,
            body: datagram.get(HEADER_BYTES..length)?,
        };
        // The last message may be without its padding.
        Some((part, datagram.get(length.next_multiple_of(4)..).unwrap_or_default()))
    }

    /// The result in the last message of an answer: `struct nlmsgerr`, or the number alone.
    fn end(&self) -> Result<(), Refusal> {
        let number = match (u32_at(self.body, 0), self.kind) {
            (Some(number), _) => number as i32,
            // A list may end without a number.
            (None, DONE) => 0,
            (None, _) => return Err(Refusal::malformed()),
        };
        match number {
            0 => Ok(()),
            1.. => Err(Refusal::malformed()),
            _ => {
                Err(Refusal { errno: number.wrapping_neg(), text: self.text().unwrap_or_default() })
            }
        }
    }

    /// The kernel's text about an error.
    fn text(&self) -> Option<String> {
        if self.flags & EXTENDED == 0 {
            return None;
        }
        let start = match self.kind {
            DONE => 4,
            _ if self.flags & CAPPED != 0 => 4 + HEADER_BYTES,
            // The request is repeated.
            _ => 4 + (u32_at(self.body, 4)? as usize).checked_next_multiple_of(4)?,
        };
        let found = attributes(self.body.get(start..)?)?;
        let text = found.iter().find(|(kind, _)| kind & KIND_MASK == ERROR_TEXT)?.1;
        Some(String::from_utf8_lossy(text).trim_end_matches('\0').to_owned())
    }
}

/// The attributes of an answer: kind and value of each. `None` if one is longer than the rest.
pub fn attributes(mut rest: &[u8]) -> Option<Vec<(u16, &[u8])>> {
    let mut all = Vec::new();
    while let (Some(size), Some(kind)) = (u16_at(rest, 0), u16_at(rest, 2)) {
        let size = usize::from(size).max(4);
        all.push((kind, rest.get(4..size)?));
        rest = rest.get(size.next_multiple_of(4)..).unwrap_or_default();
    }
    Some(all)
}

/// The number of 16 bits at this place, in the byte order of the processor.
pub fn u16_at(bytes: &[u8], at: usize) -> Option<u16> {
    bytes.get(at..)?.first_chunk().copied().map(u16::from_ne_bytes)
}

/// The number of 32 bits at this place, in the byte order of the processor.
pub fn u32_at(bytes: &[u8], at: usize) -> Option<u32> {
    bytes.get(at..)?.first_chunk().copied().map(u32::from_ne_bytes)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SEQUENCE: u32 = 7;

    /// A message of an answer.
    fn part(kind: u16, flags: u16, sequence: u32, body: &[u8]) -> Vec<u8> {
        let length = (HEADER_BYTES + body.len()) as u32;
        let mut all = length.to_ne_bytes().to_vec();
        all.extend(kind.to_ne_bytes());
        all.extend(flags.to_ne_bytes());
        all.extend(sequence.to_ne_bytes());
        all.extend([0; 4]);
        all.extend(body);
        all.resize(all.len().next_multiple_of(4), 0);
        all
    }

    fn taken(datagrams: &[Vec<u8>]) -> (Result<bool, Refusal>, Answer) {
        let mut answer = Answer::new(SEQUENCE);
        let mut last = Ok(false);
        for datagram in datagrams {
            last = answer.take(datagram);
        }
        (last, answer)
    }

    fn entries(answer: &Answer) -> Vec<Vec<u8>> {
        answer.entries().map(<[u8]>::to_vec).collect()
    }

    #[test]
    fn request_has_header_structure_and_attributes() {
        let inner = Message::new(&[]).with_text(1, "a");
        let message = Message::new(&[9; 6]).with(3, &[1, 2, 3, 4, 5]).nested(18, &inner);
        let request = message.request(16, 5, SEQUENCE).unwrap();
        assert_eq!(u32_at(&request, 0), Some(request.len() as u32));
        assert_eq!((u16_at(&request, 4), u16_at(&request, 6)), (Some(16), Some(5)));
        assert_eq!((u32_at(&request, 8), u32_at(&request, 12)), (Some(SEQUENCE), Some(0)));
        assert_eq!(request[16..24], [9, 9, 9, 9, 9, 9, 0, 0]);
        let found = attributes(&request[24..]).unwrap();
        assert_eq!(found[0], (3, &[1, 2, 3, 4, 5][..]));
        assert_eq!(found[1].0, 18 | NESTED);
        assert_eq!(attributes(found[1].1), Some(vec![(1, &b"a\0"[..])]));
    }

    #[test]
    fn attribute_longer_than_its_length_field_is_refused() {
        let longest = Message::new(&[]).with(1, &vec![0; usize::from(u16::MAX) - 4]);
        assert!(longest.request(1, 0, 0).is_some());
        let longer = Message::new(&[]).with(1, &vec![0; usize::from(u16::MAX) - 3]);
        assert!(longer.request(1, 0, 0).is_none());
        assert!(Message::new(&[]).nested(1, &longer).request(1, 0, 0).is_none());
    }

    #[test]
    fn list_is_collected_from_datagrams_until_its_end() {
        let first = [part(16, 2, SEQUENCE, &[1; 5]), part(16, 2, SEQUENCE, &[2; 4])].concat();
        let last = [part(16, 2, SEQUENCE, &[3; 4]), part(DONE, 2, SEQUENCE, &[0; 4])].concat();
        let (result, answer) = taken(std::slice::from_ref(&first));
        assert_eq!(result, Ok(false));
        assert_eq!(entries(&answer), [vec![1; 5], vec![2; 4]]);
        let (result, answer) = taken(&[first, last]);
        assert_eq!(result, Ok(true));
        assert_eq!(entries(&answer), [vec![1; 5], vec![2; 4], vec![3; 4]]);
        assert!(!answer.is_interrupted);
        // An end without a result, as older protocols send it.
        assert_eq!(taken(&[part(DONE, 2, SEQUENCE, &[])]).0, Ok(true));
    }

    #[test]
    fn answers_to_other_requests_are_left_out() {
        let old = [part(16, 0, SEQUENCE - 1, &[1; 4]), part(ERROR, 0, SEQUENCE - 1, &[0; 4])];
        let new = [part(16, 0, SEQUENCE, &[2; 4]), part(ERROR, 0, SEQUENCE, &[0; 4])];
        let (result, answer) = taken(&[old.concat()]);
        assert_eq!((result, entries(&answer).len()), (Ok(false), 0));
        let (result, answer) = taken(&[[old.concat(), new.concat()].concat()]);
        assert_eq!((result, entries(&answer)), (Ok(true), vec![vec![2; 4]]));
    }

    #[test]
    fn changed_table_is_noticed_in_any_message() {
        for at in 0..2 {
            let flags = |n| if n == at { INTERRUPTED } else { 0 };
            let all = [part(16, flags(0), SEQUENCE, &[]), part(DONE, flags(1), SEQUENCE, &[0; 4])];
            let (result, answer) = taken(&[all.concat()]);
            assert_eq!((result, answer.is_interrupted), (Ok(true), true), "{at}");
        }
    }

    #[test]
    fn refusal_has_the_number_and_the_text_of_the_kernel() {
        let number = (-libc::EEXIST).to_ne_bytes();
        let text = Message::new(&[]).with(2, &[0; 4]).with_text(ERROR_TEXT, "no way").bytes;
        let request = part(16, 5, SEQUENCE, &[8; 6]);
        let refused = |errno, text: &str| Err(Refusal { errno, text: text.into() });
        let plain = [&number[..], &request].concat();
        assert_eq!(taken(&[part(ERROR, 0, SEQUENCE, &plain)]).0, refused(libc::EEXIST, ""));
        let whole = [&number[..], &request, &text].concat();
        let whole = part(ERROR, EXTENDED, SEQUENCE, &whole);
        assert_eq!(taken(&[whole]).0, refused(libc::EEXIST, "no way"));
        let capped = [&number[..], &request[..HEADER_BYTES], &text].concat();
        let capped = part(ERROR, EXTENDED | CAPPED, SEQUENCE, &capped);
        assert_eq!(taken(&[capped]).0, refused(libc::EEXIST, "no way"));
        let done = part(DONE, EXTENDED, SEQUENCE, &[&number[..], &text].concat());
        assert_eq!(taken(&[done]).0, refused(libc::EEXIST, "no way"));
        // The number counts, even if the text cannot be read.
        let odd = part(ERROR, EXTENDED, SEQUENCE, &[&number[..], &[255; 8]].concat());
        assert_eq!(taken(&[odd]).0, refused(libc::EEXIST, ""));
        let lost = part(OVERRUN, 0, SEQUENCE, &[]);
        assert!(taken(&[lost]).0.is_err_and(|refusal| refusal.errno == libc::ENOBUFS));
    }

    #[test]
    fn malformed_answers_are_refused() {
        let good = part(16, 0, SEQUENCE, &[1; 8]);
        let with_length = |length: u32| [&length.to_ne_bytes()[..], &good[4..]].concat();
        let bad = [
            good[..7].to_vec(),
            good[..15].to_vec(),
            with_length(0),
            with_length(15),
            with_length(good.len() as u32 + 1),
            with_length(u32::MAX),
            [&good[..], &[1]].concat(),
            part(9, 0, SEQUENCE, &[]),
            part(ERROR, 0, SEQUENCE, &[0; 3]),
            part(ERROR, 0, SEQUENCE, &1i32.to_ne_bytes()),
        ];
        for bytes in bad {
            let (result, _) = taken(std::slice::from_ref(&bytes));
            assert_eq!(result, Err(Refusal::malformed()), "{bytes:?}");
        }
        let least = part(ERROR, 0, SEQUENCE, &i32::MIN.to_ne_bytes());
        assert!(taken(&[least]).0.is_err());
    }

    #[test]
    fn attribute_longer_than_the_rest_is_refused() {
        assert_eq!(attributes(&[]), Some(Vec::new()));
        assert_eq!(attributes(&[0, 0, 1, 0]), Some(vec![(1, &[][..])]));
        assert_eq!(attributes(&[9, 0, 1, 0, 5, 6, 7, 8]), None);
        assert_eq!(attributes(&[5, 0, 1, 0, 5]), Some(vec![(1, &[5][..])]));
        assert_eq!((u16_at(&[1], 0), u32_at(&[0; 4], usize::MAX)), (None, None));
    }

    proptest! {
        #[test]
        fn any_datagram_is_read_or_refused(
            datagrams in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..80), 1..4),
        ) {
            let bytes: usize = datagrams.iter().map(Vec::len).sum();
            let (_, answer) = taken(&datagrams);
            prop_assert!(answer.entries().map(<[u8]>::len).sum::<usize>() <= bytes);
        }

        #[test]
        fn any_message_is_read_or_refused(
            kind in 0..20u16,
            flags in any::<u16>(),
            body in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let whole = part(kind, flags, SEQUENCE, &body);
            let (_, answer) = taken(&[whole]);
            for entry in answer.entries() {
                prop_assert_eq!(entry, &body[..]);
                let _ = attributes(entry); // any result will do: the reader returns
            }
        }
    }
}
