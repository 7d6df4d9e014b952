//! `dormouse inspect`

use anyhow::{Context, Result};
use dormouse_api::Inspect;
use dormouse_container::{Details, Engine, Error, Listed};
use dormouse_image::Image;

use crate::command::Global;
use crate::{fail, output, view};

/// Show everything about containers or images
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print as JSON, an object per name
    #[arg(long)]
    json: bool,
    /// Search only one kind: container, image
    #[arg(long, short = 't', value_name = "KIND", value_parser = ["container", "image"])]
    r#type: Option<String>,
    /// Names or ids
    #[arg(required = true, value_name = "CONTAINER|IMAGE")]
    names: Vec<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let engine = global.engine()?;
    let kind = args.r#type.as_deref();
    Ok(fail::for_each(&args.names, |name| {
        if kind != Some("image") {
            match engine.find(name) {
                Ok(id) => return container(&engine, engine.inspect(&id)?, args.json),
                Err(Error::NoContainer(_)) if kind.is_none() => {}
                Err(e) => return Err(e.into()),
            }
        }
        match engine.images()?.find(name) {
            Ok(found) => image(&found, args.json),
            Err(e) if kind.is_none() && e.kind() == dormouse_kernel::ErrorKind::NotFound => {
                Err(anyhow::anyhow!("no container and no image is called '{name}'"))
            }
            Err(e) => Err(e).with_context(|| format!("image '{name}'")),
        }
    }))
}

fn container(engine: &Engine, d: Details, json: bool) -> Result<()> {
    let config = d.config.clone();
    let (c, shown) = (&config, Listed::from(d));
    let logs = engine.logs(&c.id)?;
    if json {
        let logs = [Some(logs.stdout), logs.stderr].into_iter().flatten();
        return output::json(&Inspect {
            summary: shown.summary(),
            logs: logs.map(|p| p.display().to_string()).collect(),
            config: c,
        });
    }
    let list = |v: &[String]| v.join(", ");
    let mut rows = vec![
        ("id", c.id.to_string()),
        ("name", c.name.to_string()),
        ("image", view::image(&c.spec.root)),
        ("state", view::status(&shown)),
        ("sleep", view::sleep(c)),
        ("wakes on", c.spec.wake_on.to_string()),
        ("pid", shown.pid.map_or_else(String::new, |p| p.to_string())),
        ("addresses", view::addresses(&c.addresses)),
        ("ports", view::ports(&c.spec.publish)),
        ("command", c.spec.process.args.join(" ")),
        ("directory", c.spec.process.cwd.clone()),
        ("user", c.spec.process.user.0.clone()),
        ("host name", c.spec.hostname.clone()),
        ("host ids", c.ids.to_proc_text().trim().replace('\n', ", ")),
        ("capabilities", list(&c.spec.security.capabilities)),
        ("output", logs.stdout.display().to_string()),
        ("errors", logs.stderr.map_or_else(String::new, |p| p.display().to_string())),
    ];
    let mounts = c.spec.mounts.iter().map(|m| {
        let mode = if m.read_only { " (read-only)" } else { "" };
        let from = match &m.kind {
            dormouse_model::MountKind::Bind { source, .. } => source.display().to_string(),
            dormouse_model::MountKind::Volume { name, .. } => format!("volume {name}"),
            dormouse_model::MountKind::Tmpfs { .. } => "tmpfs".into(),
            dormouse_model::MountKind::Devpts => "devpts".into(),
        };
        ("mount", format!("{from} at {}{mode}", m.target))
    });
    rows.extend(mounts);
    rows.extend(c.spec.process.env.iter().map(|e| ("environment", e.clone())));
    rows.extend(c.spec.labels.iter().map(|(k, v)| ("label", format!("{k}={v}"))));
    print(rows)
}

fn image(image: &Image, json: bool) -> Result<()> {
    let names: Vec<String> = image.names.iter().map(ToString::to_string).collect();
    let digest = image.digest.as_ref().map(ToString::to_string);
    let layers: Vec<String> = image.layers.iter().map(|l| l.diff_id.to_string()).collect();
    if json {
        return output::json(&dormouse_api::Image {
            id: &image.id,
            names,
            digest,
            created: image.created.as_deref(),
            size_bytes: image.size_bytes,
            layers,
            config: serde_json::to_value(&image.config).unwrap_or_default(),
        });
    }
    let defaults = crate::create::Defaults::of(image);
    let mut rows = vec![
        ("id", image.id.clone()),
        ("names", names.join(", ")),
        ("digest", digest.unwrap_or_default()),
        ("created", image.created.clone().unwrap_or_default()),
        ("size", output::bytes(image.size_bytes)),
        ("entrypoint", defaults.entrypoint.join(" ")),
        ("command", defaults.cmd.join(" ")),
        ("directory", defaults.working_dir),
        ("user", defaults.user),
    ];
    rows.extend(layers.into_iter().map(|l| ("layer", l)));
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
