//! `dormouse login`

use std::io::{BufRead, Read};
use std::os::fd::AsFd;

use anyhow::{Context, Result, bail};
use dormouse_image::registry::{Credentials, login};
use rustix::termios::{self, LocalModes, OptionalActions};

use crate::command::Global;
use crate::registry::RegistryArgs;
use crate::signal::Signals;
use crate::{fail, output, stream, terminal};

/// Store user and password for a registry, if it accepts them
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// User
    #[arg(long, short)]
    username: Option<String>,
    /// Password; rather use --password-stdin, other users can see a command line
    #[arg(long, short)]
    password: Option<String>,
    /// Read the password from standard input
    #[arg(long, conflicts_with = "password")]
    password_stdin: bool,
    #[command(flatten)]
    access: RegistryArgs,
    /// The registry, such as registry.example.org:5000
    registry: String,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let access = args.access.access(&engine)?;
    let user = match args.username {
        Some(user) => user,
        None if args.password_stdin => bail!("--password-stdin needs --username"),
        None => ask("User: ", true)?,
    };
    let secret = match args.password {
        Some(password) => password,
        None if args.password_stdin => {
            let mut text = String::new();
            let read = std::io::stdin().take(64 << 10).read_to_string(&mut text);
            read.context("cannot read the password")?;
            text.trim_end_matches(['\r', '\n']).to_owned()
        }
        None => ask("Password: ", false)?,
    };
    let file = login(&args.registry, &Credentials { user, secret }, &access)
        .with_context(|| format!("cannot log in to '{}'", args.registry))?;
    output::line(&format!("stored in {}", file.display()))?;
    Ok(0)
}

/// Reads an answer from the terminal.
fn ask(what: &str, echo: bool) -> Result<String> {
    let stdin = rustix::stdio::stdin();
    if !terminal::is_terminal(stdin) {
        bail!("standard input is no terminal: use --username and --password-stdin");
    }
    output::print(what)?;
    // ORDER: signals are blocked before the terminal's echo is off, so that none leaves it so.
    let signals = Signals::take()?;
    let before = termios::tcgetattr(stdin).context("cannot read the terminal's settings")?;
    if !echo {
        let mut silent = before.clone();
        silent.local_modes -= LocalModes::ECHO;
        termios::tcsetattr(stdin, OptionalActions::Flush, &silent)
            .context("cannot silence the terminal")?;
    }
    let mut line = String::new();
    let waited = stream::wait_readable(&[stdin, signals.as_fd()], None);
    let interrupted = signals.next().is_some();
    let read = match interrupted {
        true => Ok(0),
        false => std::io::stdin().lock().read_line(&mut line),
    };
    if !echo {
        let _ = termios::tcsetattr(stdin, OptionalActions::Drain, &before); // as it was
        output::print("\n")?;
    }
    waited?;
    if interrupted {
        return Err(fail::quiet(130));
    }
    read.context("cannot read from the terminal")?;
    Ok(line.trim_end_matches(['\r', '\n']).to_owned())
}
