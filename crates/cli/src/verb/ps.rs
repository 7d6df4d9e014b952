//! `dormouse ps`

use std::mem::ManuallyDrop;

use anyhow::{Result, bail};
use dormouse_container::Listed;

use crate::command::Global;
use crate::option::key_value;
use crate::option::time::{now_ms, span};
use crate::output::{self, Table, cut};
use crate::view::{self, is_alive};

/// List containers
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Also containers that do not run
    #[arg(long, short)]
    all: bool,
    /// Print ids only
    #[arg(long, short)]
    quiet: bool,
    /// Only matching containers: name=TEXT, state=STATE, label=KEY[=VALUE], id=DIGITS, image=NAME
    #[arg(long, short, value_name = "KEY=VALUE")]
    filter: Vec<String>,
    /// Do not shorten
    #[arg(long)]
    no_trunc: bool,
    /// Print as JSON
    #[arg(long)]
    json: bool,
}

/// One `--filter`.
#[derive(Debug, PartialEq, Eq)]
enum Filter {
    Name(String),
    Id(String),
    State(String),
    Label(String, Option<String>),
    Image(String),
}

impl Filter {
    fn read(text: &str) -> Result<Self> {
        let (key, value) = key_value(text);
        let value = value.to_owned();
        Ok(match key {
            "name" => Self::Name(value),
            "id" => Self::Id(value),
            "state" | "status" => match value.as_str() {
                "created" | "running" | "paused" | "drowsy" | "asleep" | "stopped" => {
                    Self::State(value)
                }
                "exited" => Self::State("stopped".into()),
                _ => bail!(
                    "state '{value}' is none of created, running, paused, drowsy, asleep, stopped"
                ),
            },
            "label" => match value.split_once('=') {
                Some((k, v)) => Self::Label(k.into(), Some(v.into())),
                None => Self::Label(value, None),
            },
            "image" | "ancestor" => Self::Image(value),
            _ => bail!("filter '{text}' is not valid: name=, id=, state=, label= or image="),
        })
    }

    fn fits(&self, c: &Listed) -> bool {
        match self {
            Self::Name(text) => c.name.as_str().contains(text.as_str()),
            Self::Id(digits) => c.id.as_str().starts_with(digits.as_str()),
            Self::State(state) => c.state.as_str() == state,
            Self::Label(key, value) => {
                c.labels.get(key).is_some_and(|v| value.as_ref().is_none_or(|w| v == w))
            }
            Self::Image(name) => {
                let image = view::image(&c.root);
                image == *name || image.rsplit_once(':').is_some_and(|(n, _)| n == name)
            }
        }
    }
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let filters: Vec<Filter> =
        args.filter.iter().map(|f| Filter::read(f)).collect::<Result<_>>()?;
    // A filter by state selects among all containers.
    let all = args.all || filters.iter().any(|f| matches!(f, Filter::State(_)));
    let mut list = global.engine()?.list()?;
    list.retain(|c| (all || is_alive(c.state)) && filters.iter().all(|f| f.fits(c)));
    list.reverse();
    // Freed by the end of the program: freeing a hundred thousand entries one by one gains nothing.
    let list = ManuallyDrop::new(list);
    if args.json {
        output::json_list(&list, |c| c.summary())?;
        return Ok(0);
    }
    let id = |c: &Listed| match args.no_trunc {
        true => c.id.to_string(),
        false => c.id.short().to_owned(),
    };
    if args.quiet {
        output::print(list.iter().map(|c| id(c) + "\n").collect::<String>())?;
        return Ok(0);
    }
    let short = |text: &str, max| if args.no_trunc { text.to_owned() } else { cut(text, max) };
    let mut table = Table::new([
        "CONTAINER ID",
        "NAME",
        "IMAGE",
        "COMMAND",
        "CREATED",
        "STATUS",
        "ADDRESS",
        "PORTS",
    ]);
    table.rows(&list, |c| {
        [
            id(c),
            c.name.to_string(),
            short(&view::image(&c.root), 40),
            short(&c.args.join(" "), 24),
            format!("{} ago", span(now_ms() - c.created_unix_s * 1000)),
            short(&view::status(c), 100),
            short(&view::addresses(&c.addresses), 40),
            short(&view::ports(&c.publish), 40),
        ]
    });
    table.print()?;
    Ok(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_is_parsed_or_refused() {
        assert_eq!(Filter::read("name=web").unwrap(), Filter::Name("web".into()));
        assert_eq!(Filter::read("status=exited").unwrap(), Filter::State("stopped".into()));
        assert_eq!(
            Filter::read("label=a=b=c").unwrap(),
            Filter::Label("a".into(), Some("b=c".into()))
        );
        assert_eq!(Filter::read("state=asleep").unwrap(), Filter::State("asleep".into()));
        for bad in ["", "x=y", "state=awake", "name"] {
            assert_eq!(Filter::read(bad).is_err(), bad != "name", "{bad}");
        }
    }
}
