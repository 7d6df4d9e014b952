//! Tables, JSON and text on stdout.

use std::borrow::Cow;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};
use std::sync::mpsc;
use std::thread;

use anyhow::{Context, Result};
use serde::Serialize;

use crate::fail;
use crate::text::is_hostile;
pub(crate) use crate::text::printable;

const BUFFER_BYTES: usize = 64 << 10;

/// Writes to stdout; if the reader is gone the program ends as by SIGPIPE, without a message.
pub(crate) fn print(text: impl AsRef<[u8]>) -> Result<()> {
    print_with(|out| out.write_all(text.as_ref()))
}

fn print_with(write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
    let mut out = BufWriter::with_capacity(BUFFER_BYTES, io::stdout().lock());
    match write(&mut out).and_then(|()| out.flush()) {
        Err(e) if e.kind() == io::ErrorKind::BrokenPipe => Err(fail::quiet(141)),
        other => other.context("cannot write to standard output"),
    }
}

/// Writes a line to stdout, with control characters in visible form.
pub(crate) fn line(text: &str) -> Result<()> {
    print(format!("{}\n", printable(text)))
}

/// Prints one JSON document while it is serialized.
pub(crate) fn json<T: Serialize + ?Sized>(value: &T) -> Result<()> {
    print_with(|out| {
        serde_json::to_writer_pretty(Escaping(out), value)?;
        out.write_all(b"\n")
    })
}

/// Returns JSON in one line, without characters that control a terminal.
pub(crate) fn json_text<T: Serialize + ?Sized>(value: &T) -> String {
    let mut text = Vec::new();
    match serde_json::to_writer(Escaping(&mut text), value) {
        Ok(()) => String::from_utf8_lossy(&text).into_owned(),
        Err(_) => "null".to_owned(), // values of this program can be written
    }
}

/// Prints a JSON list of the items' views.
pub(crate) fn json_list<'i, T: Sync, V: Serialize>(
    items: &'i [T],
    view: impl Fn(&'i T) -> V + Sync,
) -> Result<()> {
    let list = |part: &'i [T]| {
        let views: Vec<V> = part.iter().map(&view).collect();
        let text = serde_json::to_vec_pretty(&views);
        text.map(|mut text| {
            text.truncate(text.len() - "\n]".len());
            text.split_off("[".len())
        })
    };
    print_with(|out| {
        let mut out = Escaping(out);
        out.write_all(b"[")?;
        let mut separator: &[u8] = b"";
        in_parts(items, list, |text| {
            out.write_all(separator)?;
            separator = b",";
            out.write_all(&text?)
        })?;
        out.write_all(if items.is_empty() { b"]\n" } else { b"\n]\n" })
    })
}

/// Writes JSON without characters that control a terminal. serde_json escapes the characters below
/// U+0020, but a terminal also obeys U+0080 to U+009F. JSON has these only in strings.
struct Escaping<'o>(&'o mut dyn Write);

impl Write for Escaping<'_> {
    /// Writes whole texts, because serde_json does not divide a character.
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let text = match bytes.iter().all(|byte| *byte < 0x7f) {
            true => None,
            false => std::str::from_utf8(bytes).ok(),
        };
        let Some(text) = text else {
            self.0.write_all(bytes)?;
            return Ok(bytes.len());
        };
        // The line feeds of the layout are below U+007F and stay.
        let mut rest = text;
        while let Some(at) = rest.find(|c: char| c >= '\x7f' && is_hostile(c)) {
            self.0.write_all(&rest.as_bytes()[..at])?;
            let c = rest[at..].chars().next().unwrap_or_default();
            write!(self.0, "\\u{:04x}", u32::from(c))?;
            rest = &rest[at + c.len_utf8()..];
        }
        self.0.write_all(rest.as_bytes())?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Items per part: more are processed on several processors.
const PART: usize = 1000;

/// Processes the parts of a list on all processors, and passes the results to `take` in order: a
/// hundred thousand containers are 70 MB of JSON.
fn in_parts<'i, T: Sync, R: Send, E>(
    items: &'i [T],
    make: impl Fn(&'i [T]) -> R + Sync,
    mut take: impl FnMut(R) -> Result<(), E>,
) -> Result<(), E> {
    if items.len() <= PART {
        return if items.is_empty() { Ok(()) } else { take(make(items)) };
    }
    let cpus = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        let make = &make;
        let begin = |turn: usize| {
            let (give, made) = mpsc::sync_channel(1);
            let mut parts = items.chunks(PART).skip(turn).step_by(cpus);
            // Stops early if `take` has failed.
            scope.spawn(move || parts.all(|part| give.send(make(part)).is_ok()));
            made
        };
        let made: Vec<mpsc::Receiver<R>> = (0..cpus).map(begin).collect();
        let mut in_turn = made.iter().cycle().map_while(|from| from.recv().ok());
        in_turn.try_for_each(&mut take)
    })
}

/// Prints one JSON value on its own line.
pub(crate) fn json_line<T: Serialize + ?Sized>(value: &T) -> Result<()> {
    let mut text = serde_json::to_vec(value).context("cannot write as JSON")?;
    text.push(b'\n');
    print_with(|out| Escaping(out).write_all(&text))
}

/// Cuts a text to `max` characters, with an ellipsis in place of the rest.
pub(crate) fn cut(text: &str, max: usize) -> String {
    if text.chars().count() <= max {
        return text.to_owned();
    }
    text.chars().take(max.saturating_sub(1)).chain(['…']).collect()
}

/// A table of text: a header and rows, columns as wide as their widest cell.
#[derive(Debug)]
pub(crate) struct Table {
    columns: usize,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// Makes a table with these headings.
    pub(crate) fn new<const N: usize>(header: [&str; N]) -> Self {
        Self { columns: N, rows: vec![header.iter().map(|h| (*h).to_owned()).collect()] }
    }

    /// Adds a row.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.columns);
        let clean = |cell: String| match printable(&cell) {
            Cow::Borrowed(_) => cell,
            Cow::Owned(clean) => clean,
        };
        self.rows.push(cells.map(clean).into());
    }

    /// Adds a row for each of many items.
    pub(crate) fn rows<'i, T: Sync, const N: usize>(
        &mut self,
        items: &'i [T],
        row: impl Fn(&'i T) -> [String; N] + Sync,
    ) {
        let some = |part: &'i [T]| {
            let mut some = Self { columns: N, rows: Vec::with_capacity(part.len()) };
            part.iter().for_each(|item| some.row(row(item)));
            some.rows
        };
        let Ok(()) = in_parts(items, some, |rows| {
            self.rows.extend(rows);
            Ok::<_, Infallible>(())
        });
    }

    /// Formats the table as text.
    pub(crate) fn text(&self) -> String {
        let width = |i: usize| {
            self.rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns).map(width).collect();
        let some = |rows: &[Vec<String>]| {
            let mut text = String::new();
            for row in rows {
                for (cell, width) in row.iter().zip(&widths) {
                    let _ = write!(text, "{cell:width$}  "); // into a String: cannot fail
                }
                text.truncate(text.trim_end_matches(' ').len());
                text.push('\n');
            }
            text
        };
        let mut text = String::new();
        let Ok(()) = in_parts(&self.rows, some, |part| {
            text.push_str(&part);
            Ok::<_, Infallible>(())
        });
        text
    }

    /// Formats the rows without the headings.
    pub(crate) fn body(mut self) -> String {
        self.rows.remove(0);
        self.text()
    }

    /// Prints the table.
    pub(crate) fn print(&self) -> Result<()> {
        print(self.text())
    }
}

/// Formats a number of bytes for people: `512 B`, `1.5 kB`, `23.4 MB` (powers of 1000).
pub(crate) fn bytes(n: u64) -> String {
    let mut value = n as f64;
    let mut unit = 0;
    const UNITS: [&str; 6] = ["B", "kB", "MB", "GB", "TB", "PB"];
    while value >= 999.95 && unit + 1 < UNITS.len() {
        value /= 1000.0;
        unit += 1;
    }
    match unit {
        0 => format!("{n} B"),
        unit => format!("{value:.1} {}", UNITS[unit]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_aligns_columns_and_escapes_control_characters() {
        let mut table = Table::new(["A", "LONG"]);
        table.row(["wide cell".into(), "x".into()]);
        table.row(["\x1b[2J".into(), "y\n".into()]);
        assert_eq!(table.text(), "A          LONG\nwide cell  x\n\\u{1b}[2J  y\\n\n");
    }

    #[test]
    fn parts_are_taken_in_order_until_first_error() {
        for count in [0, 1, PART, PART + 1, 10 * PART - 1] {
            let items: Vec<usize> = (0..count).collect();
            let mut taken = Vec::new();
            let all = in_parts(&items, <[usize]>::to_vec, |part| {
                taken.extend(part);
                Ok::<_, Infallible>(())
            });
            assert!(all.is_ok() && taken == items, "{count}");
            let none = in_parts(&items, <[usize]>::to_vec, |_| Err("gone"));
            assert_eq!(none.is_err(), count > 0, "{count}");
        }
    }

    #[test]
    fn json_escapes_terminal_controls_and_keeps_its_value() {
        let value = serde_json::json!({ "a\u{9b}b": ["\u{7f}\u{1b}[2J", "\u{202e}ä…", "plain\n"] });
        let mut text = Vec::new();
        serde_json::to_writer_pretty(Escaping(&mut text), &value).unwrap();
        let text = String::from_utf8(text).unwrap();
        assert!(!text.chars().any(|c| c != '\n' && is_hostile(c)), "{text:?}");
        assert!(text.contains("ä…"));
        assert_eq!(serde_json::from_str::<serde_json::Value>(&text).unwrap(), value);
    }

    #[test]
    fn bytes_and_long_text_are_shortened() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1_500), "1.5 kB");
        assert_eq!(bytes(999_960), "1.0 MB");
        assert_eq!(bytes(u64::MAX), "18446.7 PB");
        assert_eq!(cut("abcdef", 4), "abc…");
        assert_eq!(cut("äöü", 3), "äöü");
    }
}
