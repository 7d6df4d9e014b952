//! `dormouse port`

use anyhow::{Result, bail};

use crate::command::Global;
use crate::output;
use crate::target::Target;
use crate::view::Port;

/// List the ports of the host that lead to a container
#[derive(Debug, clap::Args)]
pub(crate) struct Args {
    /// Print as JSON
    #[arg(long)]
    json: bool,
    #[command(flatten)]
    target: Target,
    /// Only the host ports of this port
    #[arg(value_name = "PORT[/udp]")]
    port: Option<String>,
}

pub(crate) fn run(global: &Global, args: Args) -> Result<u8> {
    let (engine, id) = args.target.find(global)?;
    let config = engine.config(&id)?;
    let mut ports: Vec<Port> = config.spec.publish.iter().map(Port::from).collect();
    if let Some(port) = &args.port {
        let wanted = if port.contains('/') { port.clone() } else { format!("{port}/tcp") };
        ports.retain(|p| p.container() == wanted);
        if ports.is_empty() {
            bail!("no port of the host leads to {wanted} of container '{}'", config.name);
        }
    }
    if args.json {
        output::json(&ports)?;
        return Ok(0);
    }
    for p in &ports {
        match args.port {
            Some(_) => output::line(&p.host())?,
            None => output::line(&format!("{} -> {}", p.container(), p.host()))?,
        }
    }
    Ok(0)
}
