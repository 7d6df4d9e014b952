//! `--format`: JSON, a template for each row, or a table of templates.
//!
//! Uses `template` and `output`.

use anyhow::{Result, bail};
use serde::Serialize;

use crate::output;
use crate::template::{Template, Value};

/// A chosen form of output.
#[derive(Debug)]
pub(crate) enum Format {
    /// A list of objects with podman's names.
    Json,
    /// A line for each row.
    Lines(Template),
    /// The same below headings, in columns.
    Table(Template),
}

/// Fields of the rows of a list, with their headings.
pub(crate) type Headings = [(&'static str, &'static str)];

impl Format {
    /// Reads the option of a list.
    pub(crate) fn read(text: &str) -> Result<Self> {
        if text == "json" || text == "{{json .}}" {
            return Ok(Self::Json);
        }
        if let Some(rest) = text.strip_prefix("table")
            && rest.starts_with([' ', '\t', '\\', '{'])
        {
            // A space between two actions separates columns, as in podman.
            let columns = rest.trim_start().trim_start_matches("\\t").replace("}} {{", "}}\t{{");
            return Ok(Self::Table(Template::read(&columns)?));
        }
        if !text.contains("{{") {
            bail!("format '{text}' is not known: json, a template, or 'table' and a template");
        }
        Ok(Self::Lines(Template::read(text)?))
    }

    /// Prints rows by a template. `json` prints them in the other form.
    pub(crate) fn print<R: Serialize>(
        &self,
        rows: impl Iterator<Item = R>,
        headings: &Headings,
        json: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        match self {
            Self::Json => json(),
            Self::Lines(template) => {
                let mut text = String::new();
                for row in rows {
                    text.push_str(&line(template, &row)?);
                }
                output::print(text)
            }
            Self::Table(template) => {
                let name = |(field, heading): &(&str, &str)| {
                    ((*field).to_owned(), Value::Text((*heading).to_owned()))
                };
                let head = Value::Struct(headings.iter().map(name).collect());
                let mut lines = line(template, &head)?;
                for row in rows {
                    lines.push_str(&line(template, &row)?);
                }
                output::print(columns(&lines))
            }
        }
    }
}

/// Fills a template, and ends its line.
fn line<T: Serialize + ?Sized>(template: &Template, row: &T) -> Result<String> {
    let mut text = template.fill(row)?;
    if !text.ends_with('\n') {
        text.push('\n');
    }
    Ok(text)
}

/// Aligns cells that are separated by tabs.
fn columns(text: &str) -> String {
    let mut widths: Vec<usize> = Vec::new();
    for line in text.lines() {
        for (n, cell) in line.split('\t').enumerate() {
            let width = cell.chars().count();
            match widths.get_mut(n) {
                Some(widest) => *widest = width.max(*widest),
                None => widths.push(width),
            }
        }
    }
    let mut aligned = String::new();
    for line in text.lines() {
        for (cell, width) in line.split('\t').zip(&widths) {
            aligned.push_str(&format!("{cell:width$}  "));
        }
        aligned.truncate(aligned.trim_end_matches(' ').len());
        aligned.push('\n');
    }
    aligned
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn format_is_read_or_refused() {
        assert!(matches!(Format::read("json").unwrap(), Format::Json));
        assert!(matches!(Format::read("{{.A}}").unwrap(), Format::Lines(_)));
        assert!(matches!(Format::read("table {{.A}}").unwrap(), Format::Table(_)));
        assert!(matches!(Format::read("table{{.A}}").unwrap(), Format::Table(_)));
        for bad in ["", "yaml", "table", "tables {{.A", "{{.A"] {
            assert!(Format::read(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn cells_are_aligned_below_their_headings() {
        assert_eq!(columns("NAME\tX\nlong name\ty\n"), "NAME       X\nlong name  y\n");
        assert_eq!(columns("\n"), "\n");
    }
}
