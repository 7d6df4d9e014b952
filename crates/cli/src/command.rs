//! The table of verbs, and how one of them is found and run.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;

use anyhow::Result;
use clap::{Arg, ArgMatches, Command, value_parser};

use dormouse_container::{Engine, Places};

use crate::{fail, verb};

/// Options of every verb.
#[derive(Debug, Clone, Default)]
pub(crate) struct Global {
    /// `--root DIR`, which moves state, runtime and configuration below one directory.
    pub(crate) root: Option<PathBuf>,
}

impl Global {
    /// Returns the directories of this instance.
    pub(crate) fn places(&self) -> Places {
        match &self.root {
            Some(root) => Places::below(root),
            None => Places::system(),
        }
    }

    /// Opens the engine. Sockets of sleeping containers that were lost with a keeper are recovered
    /// first; an error there stops no command.
    pub(crate) fn engine(&self) -> Result<Engine> {
        let engine = self.engine_alone()?;
        let _ = engine.take_custody_back();
        Ok(engine)
    }

    /// Opens the engine without recovery.
    pub(crate) fn engine_alone(&self) -> Result<Engine> {
        Ok(Engine::open(self.places())?)
    }
}

/// Section of the help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Group {
    /// The life of containers.
    Container,
    /// Images.
    Image,
    /// The host and this program.
    Host,
    /// For Dormouse itself, not for operators.
    Hidden,
}

/// One verb.
pub(crate) struct Verb {
    /// Its name on the command line.
    pub(crate) name: &'static str,
    /// Other names, not shown.
    pub(crate) aliases: &'static [&'static str],
    /// Its section of the help.
    pub(crate) group: Group,
    /// Its options.
    pub(crate) command: fn(Command) -> Command,
    /// Executes the verb; returns the exit code.
    pub(crate) run: fn(&Global, &ArgMatches) -> Result<u8>,
}

/// A row of the table: the module has an `Args` and a `run`.
macro_rules! verb {
    ($group:ident, $name:literal, $module:ident $(, $alias:literal)*) => {
        Verb {
            name: $name,
            aliases: &[$($alias),*],
            group: Group::$group,
            command: <verb::$module::Args as clap::Args>::augment_args,
            run: |global, matches| {
                let args = <verb::$module::Args as clap::FromArgMatches>::from_arg_matches(matches);
                verb::$module::run(global, args.map_err(anyhow::Error::new)?)
            },
        }
    };
}

/// Every verb, in the order of the help.
pub(crate) const VERBS: &[Verb] = &[
    verb!(Container, "run", run),
    verb!(Container, "create", create),
    verb!(Container, "start", start),
    verb!(Container, "stop", stop),
    verb!(Container, "restart", restart),
    verb!(Container, "kill", kill),
    verb!(Container, "rm", rm, "remove"),
    verb!(Container, "ps", ps, "list", "ls"),
    verb!(Container, "exec", exec),
    verb!(Container, "attach", attach),
    verb!(Container, "logs", logs),
    verb!(Container, "wait", wait),
    verb!(Container, "pause", pause),
    verb!(Container, "unpause", unpause, "resume"),
    verb!(Container, "checkpoint", checkpoint),
    verb!(Container, "restore", restore),
    verb!(Container, "sleep", sleep),
    verb!(Container, "wake", wake),
    verb!(Container, "clone", clone),
    verb!(Container, "explain", explain),
    verb!(Container, "rename", rename),
    verb!(Container, "inspect", inspect),
    verb!(Container, "cp", cp, "copy"),
    verb!(Container, "stats", stats),
    verb!(Container, "events", events),
    verb!(Container, "top", top),
    verb!(Container, "update", update),
    verb!(Container, "port", port),
    verb!(Image, "images", images),
    verb!(Image, "pull", pull),
    verb!(Image, "push", push),
    verb!(Image, "import", import),
    verb!(Image, "load", load),
    verb!(Image, "save", save),
    verb!(Image, "export", export),
    verb!(Image, "commit", commit),
    verb!(Image, "diff", diff),
    verb!(Image, "tag", tag),
    verb!(Image, "rmi", rmi),
    verb!(Image, "history", history),
    verb!(Image, "prune", prune),
    verb!(Image, "login", login),
    verb!(Image, "logout", logout),
    verb!(Host, "volume", volume),
    verb!(Host, "account", account),
    verb!(Host, "rules", rules),
    verb!(Host, "gate", gate),
    verb!(Host, "daemon", daemon),
    verb!(Host, "check", check),
    verb!(Host, "info", info),
    verb!(Host, "system", system),
    verb!(Host, "version", version),
    verb!(Host, "completion", completion),
    verb!(Hidden, "exists", exists),
    verb!(Hidden, "internal", internal),
];

/// Runs the program and returns the exit code.
pub(crate) fn main(args: Vec<OsString>) -> u8 {
    let args = without_noun(args);
    let found = find(&args);
    let mut command = match found {
        Some(verb) => base().subcommand(one(verb)),
        None => whole(),
    };
    let matches = match command.try_get_matches_from_mut(args) {
        Ok(matches) => matches,
        Err(e) => return usage(&e, found),
    };
    let global = Global { root: matches.get_one::<PathBuf>("root").cloned() };
    let Some((name, matches)) = matches.subcommand() else {
        return fail::FAILED; // clap requires a verb
    };
    let verb = VERBS.iter().find(|v| v.name == name);
    code(verb.map_or(Ok(fail::FAILED), |v| (v.run)(&global, matches)), verb)
}

/// Returns the exit code of a verb that has returned. An error is reported.
pub(crate) fn code(result: Result<u8>, verb: Option<&'static Verb>) -> u8 {
    match result {
        Ok(code) => code,
        Err(e) => match e.downcast::<clap::Error>() {
            Ok(e) => usage(&e, verb),
            Err(e) => fail::tell(&e),
        },
    }
}

/// Finds the verb on the command line without clap, so that clap need not have the others. `None`
/// if another word stands first; clap then reports the mistake, or prints the help.
pub(crate) fn find(args: &[OsString]) -> Option<&'static Verb> {
    let mut rest = args.iter().skip(1);
    loop {
        let word = rest.next()?;
        if word == "--root" {
            rest.next()?;
        } else if !word.as_encoded_bytes().starts_with(b"--root=") {
            let fits = |name: &str| OsStr::new(name) == word;
            return VERBS.iter().find(|v| fits(v.name) || v.aliases.iter().any(|a| fits(a)));
        }
    }
}

/// The command without verbs.
fn base() -> Command {
    Command::new("dormouse")
        .about("Isolated Linux servers on one kernel")
        .version(env!("CARGO_PKG_VERSION"))
        .subcommand_required(true)
        .disable_help_subcommand(true)
        .infer_subcommands(false)
        .subcommand_value_name("VERB")
        .arg(
            Arg::new("root")
                .long("root")
                .value_name("DIR")
                .value_parser(value_parser!(PathBuf))
                .global(true)
                .help("Keep state in DIR/lib, runtime in DIR/run, configuration in DIR/etc"),
        )
}

/// The command of one verb.
fn one(verb: &Verb) -> Command {
    let command = (verb.command)(Command::new(verb.name));
    command.aliases(verb.aliases.iter().copied()).hide(verb.group == Group::Hidden)
}

/// The whole command, for help, completions, man pages and mistakes.
pub(crate) fn whole() -> Command {
    let mut list = String::new();
    for (group, title) in
        [(Group::Container, "Containers"), (Group::Image, "Images"), (Group::Host, "Host")]
    {
        list.push_str(&format!("{title}:\n"));
        for verb in VERBS.iter().filter(|v| v.group == group) {
            let about = one(verb).get_about().map(ToString::to_string).unwrap_or_default();
            list.push_str(&format!("  {:<11} {about}\n", verb.name));
        }
        list.push('\n');
    }
    base()
        .subcommands(VERBS.iter().map(one))
        .help_template("{about}\n\n{usage-heading} {usage}\n{after-help}\nOptions:\n{options}\n")
        .after_help(format!("{list}'dormouse VERB --help' describes a verb."))
}

/// Reports a mistake in one line, or prints the requested help.
fn usage(error: &clap::Error, verb: Option<&Verb>) -> u8 {
    use clap::error::ErrorKind as Kind;
    if matches!(error.kind(), Kind::DisplayHelp | Kind::DisplayVersion) {
        let _ = error.print(); // a closed pipe is no error here
        return 0;
    }
    let text = error.render().to_string();
    let mut lines = text.lines().map(str::trim);
    let mut first = lines.next().unwrap_or_default().trim_start_matches("error: ").to_owned();
    if first.ends_with(':') {
        // The missing arguments follow, one per line, until an empty line.
        first.push(' ');
        first
            .push_str(&lines.by_ref().take_while(|l| !l.is_empty()).collect::<Vec<_>>().join(", "));
    }
    let tip = tip(error).map(|t| format!("; {t}")).unwrap_or_default();
    let help = match verb {
        Some(verb) => format!("dormouse {} --help", verb.name),
        None => "dormouse --help".to_owned(),
    };
    fail::note(&format!("{}{tip}; see '{help}'", crate::output::printable(&first)));
    fail::FAILED
}

/// What to do instead: a hint for words of other engines, or the right word for a misspelled one.
fn tip(error: &clap::Error) -> Option<String> {
    use clap::error::{ContextKind, ContextValue};
    let text = |kind| match error.get(kind) {
        Some(ContextValue::String(text)) => vec![text.clone()],
        Some(ContextValue::Strings(texts)) => texts.clone(),
        _ => Vec::new(),
    };
    let word =
        [ContextKind::InvalidArg, ContextKind::InvalidSubcommand].into_iter().find_map(|kind| {
            // A missing argument has the same context, but is no word of the command line.
            let is_unknown = matches!(
                error.kind(),
                clap::error::ErrorKind::UnknownArgument | clap::error::ErrorKind::InvalidSubcommand
            );
            text(kind).into_iter().next().filter(|_| is_unknown)
        })?;
    if let Some(hint) = crate::hint::for_word(&word) {
        return Some(hint.to_owned());
    }
    let close = [ContextKind::SuggestedArg, ContextKind::SuggestedSubcommand];
    let mut close = close.into_iter().flat_map(text);
    close.find(|other| crate::hint::is_close(&word, other)).map(|o| format!("did you mean '{o}'?"))
}

/// The verb of `container VERB`, `image VERB` and some of `system VERB`, as podman and docker also write them.
fn of_noun(noun: &str, verb: &str) -> Option<&'static [&'static str]> {
    Some(match (noun, verb) {
        ("container" | "image", "help" | "--help" | "-h") => return None,
        ("container", "ls" | "list" | "ps") => &["ps"],
        ("container", "prune") => &["prune", "--only-containers"],
        ("container", "inspect") => &["inspect", "--type", "container"],
        ("container", "exists") => &["exists", "--type", "container"],
        ("container", verb) => return one_of(Group::Container, verb),
        ("image", "ls" | "list") => &["images"],
        ("image", "rm" | "remove") => &["rmi"],
        ("image", "inspect") => &["inspect", "--type", "image"],
        ("image", "exists") => &["exists", "--type", "image"],
        ("image", verb) => return one_of(Group::Image, verb),
        ("system", "prune") => &["prune", "--containers"],
        ("system", "info") => &["info"],
        _ => return None,
    })
}

/// The name of a verb in a section of the help, as words of the command line.
fn one_of(group: Group, name: &str) -> Option<&'static [&'static str]> {
    let verb = VERBS.iter().find(|v| v.group == group && v.name == name)?;
    Some(std::slice::from_ref(&verb.name))
}

/// Replaces `container VERB`, `image VERB` and some of `system VERB` by the verb.
fn without_noun(mut args: Vec<OsString>) -> Vec<OsString> {
    let mut at = 1;
    while let Some(word) = args.get(at) {
        match word.to_str() {
            Some("--root") => at += 2,
            Some(word) if word.starts_with("--root=") => at += 1,
            _ => break,
        }
    }
    if let (Some(noun), Some(verb)) = (args.get(at), args.get(at + 1))
        && let (Some(noun), Some(verb)) = (noun.to_str(), verb.to_str())
        && let Some(words) = of_noun(noun, verb)
    {
        args.splice(at..at + 2, words.iter().map(OsString::from));
    }
    args
}

/// Reads a command line of `run` or `exec` by clap.
#[cfg(test)]
pub(crate) fn read(args: &[OsString]) -> Result<String, clap::Error> {
    use clap::FromArgMatches;
    let verb = find(args).expect("a verb");
    let matches = base().subcommand(one(verb)).try_get_matches_from(args)?;
    let global = Global { root: matches.get_one::<PathBuf>("root").cloned() };
    let (_, of_verb) = matches.subcommand().expect("a verb");
    Ok(match verb.name {
        "run" => format!("{:?}", (global, "run", verb::run::Args::from_arg_matches(of_verb)?)),
        _ => format!("{:?}", (global, "exec", verb::exec::Args::from_arg_matches(of_verb)?)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hints_are_for_options_that_do_not_exist() {
        for verb in VERBS {
            for arg in one(verb).get_arguments() {
                for name in arg.get_long_and_visible_aliases().into_iter().flatten() {
                    let is_here = matches!(verb.name, "run" | "create" | "exec" | "update");
                    let hint = crate::hint::for_word(&format!("--{name}"));
                    assert!(!is_here || hint.is_none(), "--{name} of {}", verb.name);
                }
            }
            assert!(crate::hint::for_word(verb.name).is_none(), "{}", verb.name);
        }
    }

    #[test]
    fn noun_before_verb_is_left_out() {
        let plain = |words: &[&str]| -> Vec<String> {
            let args = std::iter::once("dormouse").chain(words.iter().copied());
            let args = without_noun(args.map(OsString::from).collect());
            args[1..].iter().map(|w| w.to_string_lossy().into_owned()).collect()
        };
        assert_eq!(plain(&["container", "ls", "-a"]), ["ps", "-a"]);
        assert_eq!(plain(&["--root", "x", "container", "run", "b"]), ["--root", "x", "run", "b"]);
        assert_eq!(plain(&["image", "rm", "x"]), ["rmi", "x"]);
        assert_eq!(plain(&["system", "prune", "-f"]), ["prune", "--containers", "-f"]);
        assert_eq!(plain(&["image", "inspect", "x"]), ["inspect", "--type", "image", "x"]);
        for same in
            [&["image"][..], &["image", "build"], &["container", "pull"], &["run", "image", "ls"]]
        {
            assert_eq!(plain(same), same);
        }
    }

    #[test]
    fn every_verb_is_valid_and_has_a_description() {
        whole().debug_assert();
        for verb in VERBS {
            let command = one(verb);
            assert!(command.get_about().is_some(), "{} has no description", verb.name);
            base().subcommand(command).debug_assert();
        }
    }

    #[test]
    fn verb_is_found_first_or_after_root_option() {
        let name = |args: &[&str]| {
            let args: Vec<OsString> = args.iter().map(Into::into).collect();
            find(&args).map(|v| v.name)
        };
        assert_eq!(name(&["dormouse", "version"]), Some("version"));
        assert_eq!(name(&["dormouse", "--root", "version", "version"]), Some("version"));
        assert_eq!(name(&["dormouse", "--root=x", "version"]), Some("version"));
        for none in
            [&["dormouse"][..], &["dormouse", "--help"], &["dormouse", "--root"], &["x", "y"]]
        {
            assert_eq!(name(none), None, "{none:?}");
        }
    }
}
