//! User-visible errors, and exit codes.

use std::fmt;

use anyhow::{Error, Result};
use dormouse_container::Error as EngineError;

/// Exit code of a failure of this program, or of wrong use.
pub(crate) const FAILED: u8 = 125;

/// An error with its own exit code; without text it was reported elsewhere.
#[derive(Debug)]
pub(crate) struct Exit {
    /// The exit code.
    pub(crate) code: u8,
    text: String,
}

impl fmt::Display for Exit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Exit {}

/// Makes an error that ends the program with `code`.
pub(crate) fn exit(code: u8, text: impl Into<String>) -> Error {
    Error::new(Exit { code, text: text.into() })
}

/// Makes an error that ends the program with `code` without a message.
pub(crate) fn quiet(code: u8) -> Error {
    exit(code, "")
}

/// Returns the exit code of an error.
pub(crate) fn code(error: &Error) -> u8 {
    if let Some(exit) = error.downcast_ref::<Exit>() {
        return exit.code;
    }
    match error.downcast_ref() {
        Some(EngineError::CommandNotFound(_)) => 127,
        Some(EngineError::CommandNotExecutable(..)) => 126,
        _ => FAILED,
    }
}

/// Formats an error and its causes in one line, outermost first, without repetitions.
pub(crate) fn line(error: &Error) -> String {
    let mut line = String::new();
    for part in error.chain().map(ToString::to_string) {
        if part.is_empty() || line.contains(&part) {
            continue;
        }
        if !line.is_empty() {
            line.push_str(": ");
        }
        line.push_str(&part);
    }
    crate::text::printable(&line).into_owned()
}

/// Prints an error on stderr; returns its exit code.
pub(crate) fn tell(error: &Error) -> u8 {
    let line = line(error);
    if !line.is_empty() {
        note(&line);
    }
    code(error)
}

/// Prints a line on stderr, with control characters in visible form.
pub(crate) fn note(text: &str) {
    use std::io::Write;
    let text = crate::text::printable(text);
    let _ = writeln!(std::io::stderr(), "dormouse: {text}"); // stderr may be closed
}

/// Calls `each` for every item and prints errors without stopping; returns the exit code of the
/// last error.
pub(crate) fn for_each<T>(items: &[T], mut each: impl FnMut(&T) -> Result<()>) -> u8 {
    let mut code = 0;
    for item in items {
        if let Err(e) = each(item) {
            code = tell(&e);
        }
    }
    code
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_is_one_line_without_repetition() {
        let e = anyhow::anyhow!("no such\nfile").context("cannot read 'x'").context("image");
        assert_eq!(line(&e), "image: cannot read 'x': no such\\nfile");
        let e = anyhow::anyhow!("name taken").context("web: name taken");
        assert_eq!(line(&e), "web: name taken");
        assert_eq!(code(&e), FAILED);
        assert_eq!(code(&quiet(3)), 3);
        assert_eq!(code(&exit(1, "x").context("more")), 1);
    }
}
