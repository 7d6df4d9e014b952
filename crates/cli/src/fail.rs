//! Errors as people see them, and exit codes.

use std::fmt;

use anyhow::{Error, Result};
use dormouse_container::Error as EngineError;

/// This program failed, or was used wrongly.
pub(crate) const FAILED: u8 = 125;

/// An error with an exit code of its own; one without text was told elsewhere.
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

/// An error that ends the program with `code`.
pub(crate) fn exit(code: u8, text: impl Into<String>) -> Error {
    Error::new(Exit { code, text: text.into() })
}

/// An error that ends the program with `code` and says nothing more.
pub(crate) fn quiet(code: u8) -> Error {
    exit(code, "")
}

/// The exit code of an error.
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

/// The error and its causes in one line, outermost first; what a cause repeats is said once.
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
    crate::output::printable(&line).into_owned()
}

/// Tells an error on stderr; its exit code comes back.
pub(crate) fn tell(error: &Error) -> u8 {
    let line = line(error);
    if !line.is_empty() {
        note(&line);
    }
    code(error)
}

/// A line on stderr.
pub(crate) fn note(text: &str) {
    use std::io::Write;
    let _ = writeln!(std::io::stderr(), "dormouse: {text}"); // nobody is left to be told
}

/// Runs `each` for every item, tells the errors and goes on; the exit code is that of the last
/// error.
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
    fn an_error_is_one_line_that_repeats_nothing() {
        let e = anyhow::anyhow!("no such\nfile").context("cannot read 'x'").context("image");
        assert_eq!(line(&e), "image: cannot read 'x': no such\\nfile");
        let e = anyhow::anyhow!("name taken").context("web: name taken");
        assert_eq!(line(&e), "web: name taken");
        assert_eq!(code(&e), FAILED);
        assert_eq!(code(&quiet(3)), 3);
        assert_eq!(code(&exit(1, "x").context("more")), 1);
    }
}
