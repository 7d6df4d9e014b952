//! Log of this program: to `--log` in `--log-format`; errors also to standard error.

use std::fs::File;
use std::io::Write;
use std::sync::OnceLock;

use crate::error::{Error, Result};

#[derive(Debug)]
struct Log {
    file: Option<File>,
    json: bool,
    debug: bool,
}

static LOG: OnceLock<Log> = OnceLock::new();

/// Opens the log. Called once.
pub(crate) fn open(path: Option<&str>, format: Option<&str>, debug: bool) -> Result<()> {
    let json = match format {
        None | Some("text" | "") => false,
        Some("json") => true,
        Some(other) => return Err(Error::Usage(format!("unknown log format {other:?}"))),
    };
    let file = match path.filter(|path| !path.is_empty()) {
        None => None,
        Some(path) => {
            let file = File::options().create(true).append(true).open(path);
            Some(file.map_err(Error::file("open the log", path))?)
        }
    };
    let _ = LOG.set(Log { file, json, debug });
    Ok(())
}

fn line(json: bool, level: &str, text: &str) -> String {
    let time = now();
    match json {
        true => {
            let line = serde_json::json!({ "level": level, "msg": text, "time": time });
            format!("{line}\n")
        }
        false => format!("time={time:?} level={level} msg={text:?}\n"),
    }
}

/// Writes a line to the log, or to standard error if there is none.
fn say(level: &str, text: &str) {
    let log = LOG.get();
    let line = line(log.is_some_and(|log| log.json), level, text);
    match log.and_then(|log| log.file.as_ref()) {
        // An error in writing the log cannot be reported.
        Some(mut file) => drop(file.write_all(line.as_bytes())),
        None => drop(std::io::stderr().write_all(line.as_bytes())),
    }
}

/// Logs an error, the last message of this program.
pub(crate) fn error(text: &str) {
    say("error", text);
    if LOG.get().is_some_and(|log| log.file.is_some()) {
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

/// Logs a failure that does not affect the result of the command.
pub(crate) fn warn(text: &str) {
    say("warning", text);
}

/// Logs a message of `--debug`.
pub(crate) fn debug(text: &str) {
    if LOG.get().is_some_and(|log| log.debug) {
        say("debug", text);
    }
}

/// Returns the current time, RFC 3339.
pub(crate) fn now() -> String {
    let now = time::OffsetDateTime::now_utc();
    now.format(&time::format_description::well_known::Rfc3339).unwrap_or_default()
}
