//! What this program says about itself: to `--log` in `--log-format`, and errors to standard error,
//! too.

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
pub(super) fn open(path: Option<&str>, format: Option<&str>, debug: bool) -> Result<()> {
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
    let time = super::now();
    match json {
        true => {
            let line = serde_json::json!({ "level": level, "msg": text, "time": time });
            format!("{line}\n")
        }
        false => format!("time={time:?} level={level} msg={text:?}\n"),
    }
}

/// Says something; standard error hears of it where there is no log.
fn say(level: &str, text: &str) {
    let log = LOG.get();
    let line = line(log.is_some_and(|log| log.json), level, text);
    match log.and_then(|log| log.file.as_ref()) {
        // Who cannot be told cannot be told that either.
        Some(mut file) => drop(file.write_all(line.as_bytes())),
        None => drop(std::io::stderr().write_all(line.as_bytes())),
    }
}

/// An error: the last thing this program says.
pub(super) fn error(text: &str) {
    say("error", text);
    if LOG.get().is_some_and(|log| log.file.is_some()) {
        let _ = writeln!(std::io::stderr(), "{text}");
    }
}

/// Something that went wrong and did not matter to the command.
pub(crate) fn warn(text: &str) {
    say("warning", text);
}

/// What `--debug` asks for.
pub(super) fn debug(text: &str) {
    if LOG.get().is_some_and(|log| log.debug) {
        say("debug", text);
    }
}
