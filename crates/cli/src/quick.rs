//! The plainest forms of `run` and `exec`, read without clap.
//!
//! clap builds a table of all options of a verb, about a hundred for `run`, before it reads the first word: 0.2 ms of a
//! start. The forms here are those of most calls. Every other form, and every mistake, is left to clap. A test
//! compares the results of both.
//!
//! Uses `command`, `create` and `verb`.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use anyhow::Result;

use crate::command::{self, Global};
use crate::verb::{exec, run};

/// Runs the program and returns the exit code.
pub(crate) fn main(args: Vec<OsString>) -> u8 {
    match Quick::read(&args) {
        Some((global, quick)) => command::code(quick.run(&global), command::find(&args)),
        None => command::main(args),
    }
}

/// A verb with its options.
#[derive(Debug)]
enum Quick {
    Run(Box<run::Args>),
    Exec(Box<exec::Args>),
}

impl Quick {
    /// Reads a command line; `None` if it has another form.
    fn read(args: &[OsString]) -> Option<(Global, Self)> {
        let mut words = args.iter().skip(1).map(OsString::as_os_str);
        let mut root = None;
        let verb = loop {
            let word = words.next()?;
            let dir = match (word == "--root", word.to_str()?.strip_prefix("--root=")) {
                (true, _) => words.next()?,
                (false, Some(dir)) => OsStr::new(dir),
                (false, None) => break word,
            };
            if root.is_some() || dir.is_empty() || dir.as_encoded_bytes().starts_with(b"-") {
                return None;
            }
            root = Some(PathBuf::from(dir));
        };
        let words: Vec<&str> = words.map(OsStr::to_str).collect::<Option<_>>()?;
        let mut options = Options { words: &words };
        let quick = match verb.to_str()? {
            "run" => Self::Run(Box::new(options.run()?)),
            "exec" => Self::Exec(Box::new(options.exec()?)),
            _ => return None,
        };
        Some((Global { root }, quick))
    }

    /// Executes the verb; returns the exit code.
    fn run(self, global: &Global) -> Result<u8> {
        match self {
            Self::Run(args) => run::run(global, *args),
            Self::Exec(args) => exec::run(global, *args),
        }
    }
}

/// The words behind the verb.
struct Options<'a> {
    words: &'a [&'a str],
}

impl Options<'_> {
    fn run(&mut self) -> Option<run::Args> {
        let mut args = run::Args::plain();
        loop {
            let option = self.option()?;
            let create = &mut args.create;
            match option.as_str() {
                "" => break,
                "--rm" => set(&mut create.rm)?,
                "-d" | "--detach" => set(&mut args.detach)?,
                "-i" | "--interactive" => set(&mut create.process.interactive)?,
                "--read-only" => set(&mut create.read_only)?,
                "--name" if create.name.is_none() => create.name = Some(self.value()?),
                "-e" | "--env" => create.process.env.push(self.value()?),
                "-v" | "--volume" => create.volume.push(self.value()?),
                _ => return None,
            }
        }
        args.create.words = self.rest(1)?;
        Some(args)
    }

    fn exec(&mut self) -> Option<exec::Args> {
        let mut args = exec::Args::plain();
        loop {
            match self.option()?.as_str() {
                "" => break,
                "-d" | "--detach" => set(&mut args.detach)?,
                "-i" | "--interactive" => set(&mut args.process.interactive)?,
                "-e" | "--env" => args.process.env.push(self.value()?),
                _ => return None,
            }
        }
        args.words = self.rest(2)?;
        Some(args)
    }

    /// Takes the next word if it is an option, or else returns an empty text.
    fn option(&mut self) -> Option<String> {
        let (first, rest) = self.words.split_first()?;
        if !first.starts_with('-') {
            return Some(String::new());
        }
        self.words = rest;
        Some((*first).to_owned())
    }

    /// Takes the value of an option.
    fn value(&mut self) -> Option<String> {
        let (value, rest) = self.words.split_first()?;
        self.words = rest;
        (!value.is_empty() && !value.starts_with('-')).then(|| (*value).to_owned())
    }

    /// Takes all other words, at least so many. clap has its own view of `--` and of empty words.
    fn rest(&mut self, least: usize) -> Option<Vec<String>> {
        let is_plain = self.words.len() >= least && !self.words.contains(&"--");
        let is_plain = is_plain && !self.words.contains(&"");
        is_plain.then(|| self.words.iter().map(|&word| word.to_owned()).collect())
    }
}

/// Sets a flag; `None` if it was set.
fn set(flag: &mut bool) -> Option<()> {
    (!std::mem::replace(flag, true)).then_some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(line: &str) -> Vec<OsString> {
        std::iter::once("dormouse").chain(line.split(' ')).map(Into::into).collect()
    }

    #[test]
    fn plain_forms_are_read_as_clap_reads_them() {
        for text in [
            "run b",
            "run --rm b true",
            "--root /x run --rm b true",
            "--root=/x run --rm b true",
            "run -d --name web -e A=b --env C -v /a:/b --volume c:/d b sh -c exit",
            "run -i --read-only --interactive-not b",
            "run --detach --interactive b --rm -d --name x",
            "run b --help",
            "run --rm b ls -h --root /y --version",
            "run -e =x --env A==b b",
            "exec c true",
            "exec -i -d -e A=b c sh -c x",
            "exec --interactive --detach --env A=b c ls -l",
            "exec c ls --help --root /y -d",
        ] {
            let args = line(text);
            let clap = command::read(&args);
            match Quick::read(&args) {
                Some((global, Quick::Run(args))) => {
                    assert_eq!(format!("{:?}", (global, "run", args)), clap.unwrap(), "{text}");
                }
                Some((global, Quick::Exec(args))) => {
                    assert_eq!(format!("{:?}", (global, "exec", args)), clap.unwrap(), "{text}");
                }
                None => assert!(text.contains("-not"), "{text}"),
            }
        }
    }

    #[test]
    fn other_forms_and_mistakes_are_left_to_clap() {
        for text in [
            "run",
            "run --rm",
            "run --rm --rm b",
            "run -d --detach b",
            "run --name a --name b b",
            "run --name",
            "run --name -d b",
            "run --name=a b",
            "run -it b",
            "run -- b",
            "run b -- true",
            "run --help",
            "run -h x b",
            "run b  x",
            "run --root /y b",
            "--root /x --root /y run b",
            "--root -x run b",
            "--root= run b",
            "--root run",
            "run - b",
            "run -e - b",
            "run -e -- b",
            "run -de A=b b",
            "run -eA=b b",
            "run --detach=true b",
            "exec c",
            "exec",
            "exec -t c sh",
            "exec --privileged c sh",
            "create b",
            "ps",
            "",
        ] {
            assert!(Quick::read(&line(text)).is_none(), "{text}");
        }
    }
}
