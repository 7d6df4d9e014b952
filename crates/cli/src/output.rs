//! Tables, JSON and text on stdout.

use std::borrow::Cow;
use std::fmt::Write as _;
use std::io::{self, BufWriter, Write};

use anyhow::{Context, Result};
use serde::{Serialize, Serializer};

use crate::fail;

const BUFFER_BYTES: usize = 64 << 10;

/// Writes to stdout; a reader that has gone away ends the program as SIGPIPE would, without a
/// word.
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

/// Writes a line to stdout.
pub(crate) fn line(text: &str) -> Result<()> {
    print(format!("{text}\n"))
}

/// Prints one JSON document, as it is made: a hundred thousand containers are 70 MB.
pub(crate) fn json<T: Serialize + ?Sized>(value: &T) -> Result<()> {
    print_with(|mut out| {
        serde_json::to_writer_pretty(&mut out, value)?;
        out.write_all(b"\n")
    })
}

/// Many values as one JSON list, each made when it is its turn.
pub(crate) struct Each<I>(pub(crate) I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for Each<I> {
    fn serialize<S: Serializer>(&self, to: S) -> std::result::Result<S::Ok, S::Error> {
        to.collect_seq(self.0.clone())
    }
}

/// Prints one JSON value on a line of its own.
pub(crate) fn json_line<T: Serialize + ?Sized>(value: &T) -> Result<()> {
    let mut text = serde_json::to_vec(value).context("cannot write as JSON")?;
    text.push(b'\n');
    print(text)
}

/// Text that does nothing to a terminal: control characters are shown, not sent.
///
/// Names, labels and commands come from images and containers, which are not to be trusted with
/// escape sequences.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    let hostile =
        |c: char| c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    if text.contains(hostile) {
        let mut clean = String::with_capacity(text.len() + 8);
        for c in text.chars() {
            if hostile(c) { clean.extend(c.escape_default()) } else { clean.push(c) }
        }
        Cow::Owned(clean)
    } else {
        Cow::Borrowed(text)
    }
}

/// At most `max` characters of a text, with an ellipsis in place of the rest.
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
    /// A table with these headings.
    pub(crate) fn new<const N: usize>(header: [&str; N]) -> Self {
        Self { columns: N, rows: vec![header.iter().map(|h| (*h).to_owned()).collect()] }
    }

    /// Adds a row.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        debug_assert_eq!(N, self.columns);
        self.rows.push(cells.iter().map(|c| printable(c).into_owned()).collect());
    }

    /// The table as text.
    pub(crate) fn text(&self) -> String {
        let width = |i: usize| {
            self.rows.iter().filter_map(|r| r.get(i)).map(|c| c.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..self.columns).map(width).collect();
        let mut text = String::new();
        for row in &self.rows {
            let mut line = String::new();
            for (cell, width) in row.iter().zip(&widths) {
                let _ = write!(line, "{cell:width$}  "); // into a String: cannot fail
            }
            text.push_str(line.trim_end());
            text.push('\n');
        }
        text
    }

    /// Prints the table.
    pub(crate) fn print(&self) -> Result<()> {
        print(self.text())
    }
}

/// A number of bytes as people read it: `512 B`, `1.5 kB`, `23.4 MB` (powers of 1000).
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
    fn columns_line_up_and_control_characters_do_nothing() {
        let mut table = Table::new(["A", "LONG"]);
        table.row(["wide cell".into(), "x".into()]);
        table.row(["\x1b[2J".into(), "y\n".into()]);
        assert_eq!(table.text(), "A          LONG\nwide cell  x\n\\u{1b}[2J  y\\n\n");
    }

    #[test]
    fn amounts() {
        assert_eq!(bytes(0), "0 B");
        assert_eq!(bytes(1_500), "1.5 kB");
        assert_eq!(bytes(999_960), "1.0 MB");
        assert_eq!(bytes(u64::MAX), "18446.7 PB");
        assert_eq!(cut("abcdef", 4), "abc…");
        assert_eq!(cut("äöü", 3), "äöü");
    }
}
