//! Flags in the syntax of Go programs such as runc: `-name`, `--name`, `--name=value`, `--name
//! value`. `--` ends them. A word that is no flag ends them only where the following words belong to
//! another program ([`Words::End`]); elsewhere flags may follow, as with runc and crun.

use std::collections::BTreeMap;
use std::ffi::OsString;

use crate::error::{Error, Result};

/// Arguments of a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Takes {
    /// None; `=true` and `=false` are accepted.
    Nothing,
    /// A value; the last one counts.
    One,
    /// A value; the flag may be repeated.
    Many,
}

/// The effect of a word that is no flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Words {
    /// Flags may follow it.
    Between,
    /// No flag follows it.
    End,
}

/// One flag: its name, a short one or an empty text, its arguments, its description.
pub(super) type Flag = (&'static str, &'static str, Takes, &'static str);

// Flags of several verbs.
pub(super) const HELP: Flag = ("help", "h", Takes::Nothing, "show this");
pub(super) const BUNDLE: Flag =
    ("bundle", "b", Takes::One, "directory of config.json; the current one by default");
pub(super) const CONSOLE: Flag =
    ("console-socket", "", Takes::One, "socket that receives the master of the terminal");
pub(super) const PID_FILE: Flag =
    ("pid-file", "", Takes::One, "file that receives the process's pid");
pub(super) const NO_PIVOT: Flag =
    ("no-pivot", "", Takes::Nothing, "only cover the host's root: for an initramfs");
pub(super) const KEYRING: Flag =
    ("no-new-keyring", "", Takes::Nothing, "keep the caller's session keyring");
pub(super) const DETACH: Flag = ("detach", "d", Takes::Nothing, "do not wait for the process");

/// The given flags.
#[derive(Debug, Default)]
pub(super) struct Given {
    values: BTreeMap<&'static str, Vec<String>>,
    /// The words after the flags.
    pub(super) rest: Vec<String>,
}

impl Given {
    /// Reads words by a table.
    pub(super) fn read(table: &[Flag], between: Words, words: Vec<OsString>) -> Result<Self> {
        let mut given = Self::default();
        let mut texts = Vec::with_capacity(words.len());
        for word in words {
            let text = word.into_string();
            texts.push(text.map_err(|w| Error::Usage(format!("{w:?} is not UTF-8")))?);
        }
        let mut texts = texts.into_iter();
        while let Some(text) = texts.next() {
            if text == "--" {
                break;
            }
            let Some(word) = text.strip_prefix('-').filter(|word| !word.is_empty()) else {
                given.rest.push(text);
                match between {
                    Words::Between => continue,
                    Words::End => break,
                }
            };
            let word = word.strip_prefix('-').unwrap_or(word);
            let (name, value) = match word.split_once('=') {
                Some((name, value)) => (name, Some(value.to_owned())),
                None => (word, None),
            };
            let known = |flag: &&Flag| flag.0 == name || (!flag.1.is_empty() && flag.1 == name);
            let Some((name, _, takes, _)) = table.iter().find(known) else {
                return Err(Error::Usage(format!("flag provided but not defined: -{name}")));
            };
            let value = match (takes, value) {
                (_, Some(value)) => value,
                (Takes::Nothing, None) => "true".to_owned(),
                (_, None) => texts
                    .next()
                    .ok_or_else(|| Error::Usage(format!("flag needs an argument: -{name}")))?,
            };
            if *takes == Takes::Nothing && !["true", "false", "1", "0"].contains(&value.as_str()) {
                return Err(Error::Usage(format!("{value:?} is no boolean value for -{name}")));
            }
            given.values.entry(name).or_default().push(value);
        }
        given.rest.extend(texts);
        Ok(given)
    }

    /// Returns whether a flag without argument was given.
    pub(super) fn has(&self, name: &str) -> bool {
        self.one(name).is_some_and(|value| value == "true" || value == "1")
    }

    /// Returns the value of a flag.
    pub(super) fn one(&self, name: &str) -> Option<&str> {
        self.values.get(name)?.last().map(String::as_str)
    }

    /// Returns all values of a flag.
    pub(super) fn many(&self, name: &str) -> &[String] {
        self.values.get(name).map_or(&[], Vec::as_slice)
    }

    /// Returns the value of a flag as a number.
    pub(super) fn number<T: std::str::FromStr>(&self, name: &str) -> Result<Option<T>> {
        let Some(value) = self.one(name) else { return Ok(None) };
        let bad = || Error::Usage(format!("--{name}: {value:?} is no such number"));
        value.parse().map(Some).map_err(|_| bad())
    }

    /// Returns the only word after the flags.
    pub(super) fn id(&self) -> Result<&str> {
        match self.rest.as_slice() {
            [id] => Ok(id),
            [] => Err(Error::Usage("the container id is missing".into())),
            [_, more, ..] => Err(Error::Usage(format!("{more:?} is one word too many"))),
        }
    }
}

/// Formats the flags of a table, a line each.
pub(super) fn help(table: &[Flag]) -> String {
    let line = |(name, short, takes, what): &Flag| {
        let value = if *takes == Takes::Nothing { "" } else { " value" };
        let short = if short.is_empty() { String::new() } else { format!(", -{short}{value}") };
        format!("   {:<34} {what}\n", format!("--{name}{value}{short}"))
    };
    table.iter().map(line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const TABLE: &[Flag] = &[
        ("bundle", "b", Takes::One, ""),
        ("detach", "d", Takes::Nothing, ""),
        ("env", "e", Takes::Many, ""),
    ];

    fn read(line: &str) -> Result<Given> {
        Given::read(TABLE, Words::End, line.split(' ').map(OsString::from).collect())
    }

    #[test]
    fn flag_after_word_is_read_where_words_do_not_end_flags() {
        let words = || "id -b x TERM -d -- -e".split(' ').map(OsString::from).collect();
        let given = Given::read(TABLE, Words::Between, words()).expect("good");
        assert_eq!((given.one("bundle"), given.has("detach")), (Some("x"), true));
        assert_eq!(given.rest, ["id", "TERM", "-e"]);
        let given = Given::read(TABLE, Words::End, words()).expect("good");
        assert_eq!(given.rest.len(), 7);
    }

    #[test]
    fn one_and_two_dashes_are_equivalent() {
        for line in ["-b x id -d", "--bundle x id -d", "-bundle=x id -d", "--b=x id -d"] {
            let given = read(line).expect("good");
            assert_eq!(given.one("bundle"), Some("x"), "{line}");
            assert_eq!(given.rest, ["id", "-d"], "{line}");
            assert!(!given.has("detach"), "{line}");
        }
        let given = read("-d -e a=b --env c -- -x").expect("good");
        assert!(given.has("detach"));
        assert_eq!(given.many("env"), ["a=b", "c"]);
        assert_eq!(given.rest, ["-x"]);
        assert!(!read("--detach=false id").expect("good").has("detach"));
    }

    #[test]
    fn unknown_or_incomplete_flag_is_refused() {
        for line in ["--no id", "-b", "--detach=perhaps id"] {
            assert!(read(line).is_err(), "{line}");
        }
    }
}
