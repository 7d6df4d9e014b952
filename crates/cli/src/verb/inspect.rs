//! `dormouse inspect`

use std::time::Duration;

use anyhow::{Context, Result, bail};
use dormouse_api::{Inspect, compatible as objects};
use dormouse_container::{Details, Engine, Error, Listed};
use dormouse_image::Image;
use dormouse_model::{Bandwidth, Cpu, Drive, Spec};
use serde::Serialize;

use crate::command::Global;
use crate::template::Template;
use crate::{compatible, fail, output, view};

/// Show everything about containers, images or volumes, as a JSON array with podman's names
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// json, a Go template such as '{{.State.Status}}', or 'table' for a list to read
    #[arg(long, short, value_name = "FORMAT")]
    format: Option<String>,
    /// Print as JSON with this program's names, an object per name
    #[arg(long, conflicts_with = "format")]
    json: bool,
    /// Search only one kind: container, image, volume, all
    #[arg(long, short = 't', value_name = "KIND", default_value = "all", value_parser = ["container", "image", "volume", "all"])]
    r#type: String,
    /// The newest container
    #[arg(long, short)]
    latest: bool,
    /// Names or ids
    #[arg(value_name = "CONTAINER|IMAGE|VOLUME")]
    names: Vec<String>,
}

/// The form of the output.
enum Form {
    /// An array of all objects at the end.
    Array,
    /// A line for each object.
    Template(Template),
    /// A table for each object.
    Table,
    /// An object of our own for each.
    Json,
}

/// An object with podman's names.
#[derive(Serialize)]
#[serde(untagged)]
enum Object {
    Container(Box<objects::Container>),
    Image(Box<objects::Image>),
    Volume(objects::Volume),
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let form = match args.format.as_deref() {
        _ if args.json => Form::Json,
        None | Some("json" | "") => Form::Array,
        Some("table") => Form::Table,
        Some(text) if text.contains("{{") => Form::Template(Template::read(text)?),
        Some(text) => {
            bail!("format '{text}' is not known: json, table, or a template with {{{{...}}}}")
        }
    };
    let engine = global.engine()?;
    let mut names = args.names;
    if args.latest {
        if !names.is_empty() {
            bail!("give either --latest or names, not both");
        }
        let list = engine.list()?;
        names.extend(list.last().map(|c| c.id.to_string()));
    }
    if names.is_empty() {
        bail!("name a container, an image or a volume");
    }
    let mut found = Vec::new();
    let code = fail::for_each(&names, |name| match find(&engine, name, &args.r#type)? {
        Found::Container(details) => match &form {
            Form::Table => container_table(&engine, *details),
            Form::Json => container_json(&engine, *details),
            Form::Array | Form::Template(_) => {
                let object = compatible::container(&engine, &details)?;
                add(Object::Container(Box::new(object)), &form, &mut found)
            }
        },
        Found::Image(image) => match &form {
            Form::Table => image_table(&image),
            Form::Json => image_json(&image),
            Form::Array | Form::Template(_) => {
                let object = Object::Image(Box::new(compatible::image(&image)));
                add(object, &form, &mut found)
            }
        },
        Found::Volume(volume) => {
            let volume = compatible::volume(&volume);
            match &form {
                Form::Json | Form::Table => output::json(&volume),
                form => add(Object::Volume(volume), form, &mut found),
            }
        }
    });
    if matches!(form, Form::Array) {
        output::json(&found)?;
    }
    Ok(code)
}

/// Prints an object by the template, or adds it to the array.
fn add(object: Object, form: &Form, found: &mut Vec<Object>) -> Result<()> {
    if let Form::Template(template) = form {
        return output::print(template.fill(&object)? + "\n");
    }
    found.push(object);
    Ok(())
}

enum Found {
    Container(Box<Details>),
    Image(Box<Image>),
    Volume(dormouse_container::Volume),
}

/// Finds the first kind of object with a name, in podman's order.
fn find(engine: &Engine, name: &str, kind: &str) -> Result<Found> {
    let tries = |one: &str| kind == one || kind == "all";
    if tries("container") {
        match engine.find(name) {
            Ok(id) => return Ok(Found::Container(Box::new(engine.inspect(&id)?))),
            Err(Error::NoContainer(_)) if kind == "all" => {}
            Err(e) => return Err(e.into()),
        }
    }
    if tries("image") {
        match engine.images()?.find(name) {
            Ok(image) => return Ok(Found::Image(Box::new(image))),
            Err(e) if kind == "all" && e.kind() == dormouse_kernel::ErrorKind::NotFound => {}
            Err(e) => return Err(e).with_context(|| format!("image '{name}'")),
        }
    }
    if let Ok(name) = name.parse() {
        match engine.volume(&name) {
            Ok(volume) => return Ok(Found::Volume(volume)),
            Err(Error::NoVolume(_)) if kind == "all" => {}
            Err(e) => return Err(e.into()),
        }
    }
    match kind {
        "volume" => bail!("no volume is called '{name}'"),
        _ => bail!("no container, image or volume is called '{name}'"),
    }
}

fn container_json(engine: &Engine, details: Details) -> Result<()> {
    let config = details.config.clone();
    let (c, shown) = (&config, Listed::from(details));
    let logs = engine.logs(&c.id)?;
    let logs = [Some(logs.stdout), logs.stderr].into_iter().flatten();
    output::json(&Inspect {
        summary: shown.summary(),
        account: engine.account_of(c),
        shared: c.spec.shared,
        unproven: engine.unproven(&c.id),
        not_shown_inside: engine.view_gaps(c),
        warm_memory_bytes: engine.warm_bytes(&c.id)?,
        barrier_refused: engine.barrier_refused(&c.id)?,
        not_enforced: engine.not_enforced(c)?,
        logs: logs.map(|p| p.display().to_string()).collect(),
        config: c,
    })
}

fn container_table(engine: &Engine, details: Details) -> Result<()> {
    let object = compatible::container(engine, &details)?;
    let config = details.config.clone();
    let (c, shown) = (&config, Listed::from(details));
    let logs = engine.logs(&c.id)?;
    let list = |v: &[String]| v.join(", ");
    // A container that stops meanwhile has no row for it.
    let stats = shown.pid.and_then(|_| engine.stats(&c.id).ok());
    let has_rates = !c.spec.limits.disk_rates.is_empty();
    let disk_used = stats.as_ref().filter(|_| has_rates).map_or_else(String::new, |stats| {
        let [read, written] = [stats.io_read_bytes, stats.io_write_bytes].map(output::bytes);
        format!("{read} read, {written} written")
    });
    let used = stats.map_or_else(String::new, |stats| {
        let seconds = |ns: u64| Duration::from_nanos(ns).as_secs_f64();
        let used = format!("{:.3} s", seconds(stats.cpu_usage_ns));
        match stats.cpu_throttled_ns {
            0 => used,
            ns => format!("{used}, throttled for {:.3} s", seconds(ns)),
        }
    });
    let number = |n: u64| if n == 0 { String::new() } else { n.to_string() };
    let host = &object.host_config;
    let policy = match (host.restart_policy.name, host.restart_policy.maximum_retry_count) {
        (name, 0) => name.to_owned(),
        (name, retries) => format!("{name}, at most {retries} times"),
    };
    let sockets = match c.spec.limits.most_sockets() {
        None => String::new(),
        most => view::of_most(object.dormouse.sockets, most),
    };
    let mut rows = vec![
        ("id", c.id.to_string()),
        ("name", c.name.to_string()),
        ("image", view::image(&c.spec.root)),
        ("state", view::status_with_checkpoints(engine, &shown)),
        ("sleep", view::sleep(c)),
        ("wakes on", c.spec.wake_on.to_string()),
        ("out of memory", if c.spec.oom.is_default() { String::new() } else { "sleeps".into() }),
        ("evicted by", evicted_by(&c.spec)),
        ("not proven", engine.unproven(&c.id).unwrap_or_default()),
        ("restart", policy),
        ("restarts", number(object.restart_count.into())),
        ("pid", shown.pid.map_or_else(String::new, |p| p.to_string())),
        ("addresses", view::addresses(&c.addresses)),
        ("ports", view::ports(&c.spec.publish)),
        ("command", c.spec.process.args.join(" ")),
        ("directory", c.spec.process.cwd.clone()),
        ("user", c.spec.process.user.0.clone()),
        ("host name", c.spec.hostname.clone()),
        ("host ids", c.ids.to_proc_text().trim().replace('\n', ", ")),
        ("memory", c.spec.limits.memory_max_bytes.map_or_else(String::new, output::bytes)),
        ("processors", c.spec.limits.cpu_max_milli.map_or_else(String::new, milli)),
        ("not shown inside", engine.view_gaps(c).join("; ")),
        ("CPU contract", Cpu::of(&c.spec.limits).to_string()),
        ("CPU time used", used),
        ("disk size", Drive::of(&c.spec.limits).map_or_else(String::new, |it| it.to_string())),
        ("disk weight", c.spec.limits.io_weight.map_or_else(String::new, |w| w.to_string())),
        ("disk rates", view::disk_rates(&c.spec.limits.disk_rates)),
        ("disk used", disk_used),
        ("network", Bandwidth::of(&c.spec.limits).map_or_else(String::new, |it| it.to_string())),
        ("not enforced", engine.not_enforced(c)?.join("; ")),
        ("account", engine.account_of(c)),
        (
            "shared",
            if c.spec.shared { "its work is charged to its clients".into() } else { String::new() },
        ),
        ("tasks", number(host.pids_limit.into())),
        ("sockets", sockets),
        ("capabilities", list(&c.spec.security.capabilities)),
        ("barrier", engine.barrier_refused(&c.id)?.map_or_else(String::new, barrier)),
        ("output", logs.stdout.display().to_string()),
        ("errors", logs.stderr.map_or_else(String::new, |p| p.display().to_string())),
    ];
    let mounts = object.mounts.iter().map(|m| {
        let mode = if m.rw { "" } else { " (read-only)" };
        let from = match m.r#type {
            "volume" => format!("volume {}", m.name),
            _ => m.source.clone(),
        };
        ("mount", format!("{from} at {}{mode}", m.destination))
    });
    rows.extend(mounts);
    rows.extend(c.spec.process.env.iter().map(|e| ("environment", e.clone())));
    rows.extend(c.spec.labels.iter().map(|(k, v)| ("label", format!("{k}={v}"))));
    print(rows)
}

/// How many calls were refused.
fn barrier(refused: u64) -> String {
    format!("{refused} calls refused")
}

/// What is done with it while the host is short of memory; empty if nothing is.
fn evicted_by(spec: &Spec) -> String {
    spec.eviction().map_or_else(String::new, |it| it.as_str().to_owned())
}

/// `1.5` for 1,500 thousandths.
fn milli(milli: u32) -> String {
    (f64::from(milli) / 1000.0).to_string()
}

fn image_json(image: &Image) -> Result<()> {
    output::json(&dormouse_api::Image {
        id: &image.id,
        names: image.names.iter().map(ToString::to_string).collect(),
        digest: image.digest.as_ref().map(ToString::to_string),
        created: image.created.as_deref(),
        size_bytes: image.size_bytes,
        layers: image.layers.iter().map(|l| l.diff_id.to_string()).collect(),
        config: serde_json::to_value(&image.config).unwrap_or_default(),
    })
}

fn image_table(image: &Image) -> Result<()> {
    let names: Vec<String> = image.names.iter().map(ToString::to_string).collect();
    let defaults = crate::create::Defaults::of(image);
    let mut rows = vec![
        ("id", image.id.clone()),
        ("names", names.join(", ")),
        ("digest", image.digest.as_ref().map(ToString::to_string).unwrap_or_default()),
        ("created", image.created.clone().unwrap_or_default()),
        ("size", output::bytes(image.size_bytes)),
        ("entrypoint", defaults.entrypoint.join(" ")),
        ("command", defaults.cmd.join(" ")),
        ("directory", defaults.working_dir),
        ("user", defaults.user),
    ];
    rows.extend(image.layers.iter().map(|l| ("layer", l.diff_id.to_string())));
    rows.extend(defaults.volumes.into_iter().map(|v| ("volume", v)));
    rows.extend(defaults.env.into_iter().map(|e| ("environment", e)));
    rows.extend(defaults.labels.into_iter().map(|(k, v)| ("label", format!("{k}={v}"))));
    print(rows)
}

/// Prints the rows that have a value.
fn print(rows: Vec<(&str, String)>) -> Result<()> {
    let line = |(key, value): &(&str, String)| format!("{key:<13} {}\n", output::printable(value));
    output::print(rows.iter().filter(|(_, v)| !v.is_empty()).map(line).collect::<String>())
}
