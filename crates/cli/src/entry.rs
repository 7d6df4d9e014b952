//! Logs of entries (`dormouse_model::LogEntry`), shown line by line in the order of the writes.

use std::collections::VecDeque;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;

use anyhow::{Context, Result};
use dormouse_model::{LogEntry, LogStream};

use crate::log::{Growing, Sink, forget_events, write};
use crate::stream::Watch;

/// The lines that are shown.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Selection {
    /// Only so many at the end.
    pub(crate) tail: Option<u64>,
    /// Only those from this time on, in milliseconds since the epoch.
    pub(crate) since_ms: Option<i64>,
    /// Only those until this time.
    pub(crate) until_ms: Option<i64>,
    /// Each line is shown with its time.
    pub(crate) timestamps: bool,
}

impl Selection {
    /// Returns whether the times of lines are needed.
    pub(crate) fn needs_times(&self) -> bool {
        self.since_ms.is_some() || self.until_ms.is_some() || self.timestamps
    }

    fn has(&self, entry: &LogEntry<'_>) -> bool {
        let ms = (entry.unix_ns / 1_000_000) as i64;
        self.since_ms.is_none_or(|since| ms >= since)
            && self.until_ms.is_none_or(|until| ms <= until)
    }
}

/// A log that is shown as it grows.
#[derive(Debug)]
pub(crate) struct Entries {
    changes: OwnedFd,
    log: Growing,
    selection: Selection,
    /// Bytes of an entry whose end was not read yet.
    rest: Vec<u8>,
    block: Vec<u8>,
    /// Whether the last entry of each stream did not end its line.
    open: [bool; 2],
}

impl Entries {
    /// Opens a log at its first line, or at the last `tail` lines.
    pub(crate) fn open(path: &Path, selection: &Selection, follows: bool) -> Result<Self> {
        let missing = || format!("the log '{}' does not exist", path.display());
        // A container that never ran has none.
        let log = match Growing::open(path)? {
            Some(log) => log,
            None => Growing::open(Path::new("/dev/null"))?.with_context(missing)?,
        };
        let changes = Growing::watch(std::iter::once(&log), follows)?;
        let (rest, block) = (Vec::new(), Vec::new());
        let mut entries =
            Self { changes, log, selection: *selection, rest, block, open: [false; 2] };
        match selection.tail {
            None => {}
            Some(0) => entries.log.seek_end()?,
            Some(lines) => entries.seek_last(lines)?,
        }
        Ok(entries)
    }

    /// Goes to the first entry of the last `lines` lines.
    fn seek_last(&mut self, lines: u64) -> Result<()> {
        let first = self.log.offset();
        let mut starts = VecDeque::new();
        let mut open = [false; 2];
        self.each(|offset, line| {
            let entry = LogEntry::read(line);
            let continues =
                entry.map(|it| std::mem::replace(&mut open[index(it.stream)], !it.ends_line));
            if continues != Some(true) {
                starts.push_back(offset);
                if starts.len() as u64 > lines {
                    starts.pop_front();
                }
            }
            Ok(())
        })?;
        self.rest.clear();
        self.log.seek(starts.front().copied().unwrap_or(first));
        Ok(())
    }

    /// Calls `does` for each further entry with its offset. An entry without its end stays in
    /// `rest`.
    fn each(&mut self, mut does: impl FnMut(u64, &[u8]) -> Result<()>) -> Result<()> {
        loop {
            let before = self.log.offset();
            let bytes = self.log.read(&mut self.block)?;
            if bytes.is_empty() {
                return Ok(());
            }
            let (length, after) = (bytes.len() as u64, self.log.offset());
            if after - length != before {
                self.rest.clear(); // a hole; reading continues at a whole entry
            }
            let mut offset = after - length - self.rest.len() as u64;
            for line in self.block[..length as usize].split_inclusive(|byte| *byte == b'\n') {
                let Some(line) = line.strip_suffix(b"\n") else {
                    self.rest.extend_from_slice(line);
                    continue;
                };
                let whole = match self.rest.is_empty() {
                    true => line,
                    false => {
                        self.rest.extend_from_slice(line);
                        &self.rest[..]
                    }
                };
                does(offset, whole)?;
                offset += whole.len() as u64 + 1;
                self.rest.clear();
            }
        }
    }

    /// Shows new entries.
    fn show(&mut self) -> Result<()> {
        let (selection, mut open) = (self.selection, self.open);
        let mut shown = Shown::default();
        let done = self.each(|_, line| {
            let Some(entry) = LogEntry::read(line) else {
                // Not by this program; or a host that lost power.
                shown.add(Sink::Out, line)?;
                return shown.add(Sink::Out, b"\n");
            };
            let continues = std::mem::replace(&mut open[index(entry.stream)], !entry.ends_line);
            if !selection.has(&entry) {
                return Ok(());
            }
            let sink = match entry.stream {
                LogStream::Stdout => Sink::Out,
                LogStream::Stderr => Sink::Err,
            };
            if selection.timestamps && !continues {
                shown.add(sink, LogEntry::stamp(line).unwrap_or_default().as_bytes())?;
                shown.add(sink, b" ")?;
            }
            shown.add(sink, entry.text)?;
            if entry.ends_line { shown.add(sink, b"\n") } else { Ok(()) }
        });
        self.open = open;
        done.and_then(|()| shown.write())
    }
}

fn index(stream: LogStream) -> usize {
    match stream {
        LogStream::Stdout => 0,
        LogStream::Stderr => 1,
    }
}

/// Text that is written when the stream changes, so that both arrive in their order.
#[derive(Default)]
struct Shown {
    sink: Option<Sink>,
    text: Vec<u8>,
}

impl Shown {
    fn add(&mut self, sink: Sink, text: &[u8]) -> Result<()> {
        if self.sink != Some(sink) || self.text.len() > 64 << 10 {
            self.write()?;
            self.sink = Some(sink);
        }
        self.text.extend_from_slice(text);
        Ok(())
    }

    fn write(&mut self) -> Result<()> {
        let text = std::mem::take(&mut self.text);
        self.sink.map_or(Ok(()), |sink| write(sink, &text))
    }
}

impl Watch for Entries {
    fn fd(&self) -> BorrowedFd<'_> {
        self.changes.as_fd()
    }

    fn serve(&mut self) -> Result<()> {
        forget_events(&self.changes);
        self.show()
    }
}
