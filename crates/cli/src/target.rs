//! Selection of the container or the containers of a verb.

use anyhow::{Result, bail};
use dormouse_container::Engine;
use dormouse_model::{ContainerId, State};

use crate::bulk::Bulk;
use crate::command::Global;
use crate::{fail, output};

/// One container by name, id, or the beginning of an id.
#[derive(Debug, clap::Args)]
pub(crate) struct Target {
    /// Name or id
    #[arg(value_name = "CONTAINER")]
    name: String,
}

impl Target {
    /// Opens the engine and finds the container.
    pub(crate) fn find(&self, global: &Global) -> Result<(Engine, ContainerId)> {
        let engine = global.engine()?;
        let id = engine.find(&self.name)?;
        Ok((engine, id))
    }
}

/// Containers by name, id, or the beginning of an id.
#[derive(Debug, clap::Args)]
pub(crate) struct Targets {
    /// All containers
    #[arg(long, short)]
    pub(crate) all: bool,
    /// Names or ids
    #[arg(value_name = "CONTAINER")]
    pub(crate) names: Vec<String>,
}

impl Targets {
    /// Calls `f` for each container, prints each name when it is done, and continues after errors;
    /// returns the exit code of the last error. `--all` selects the containers in a state that
    /// `fits`.
    pub(crate) fn each(
        &self,
        global: &Global,
        fits: fn(State) -> bool,
        mut f: impl FnMut(&Engine, &ContainerId) -> Result<()>,
    ) -> Result<u8> {
        let engine = global.engine()?;
        let mut done = |id: &ContainerId, name: &str, bulk: &Bulk| {
            let done = f(&engine, id);
            bulk.done(1);
            done?;
            output::line(name)
        };
        if self.all {
            if !self.names.is_empty() {
                bail!("give either --all or containers, not both");
            }
            let all = engine.list()?;
            let all: Vec<_> = all.iter().filter(|d| fits(d.state)).collect();
            let bulk = Bulk::new("containers", all.len());
            return Ok(fail::for_each(&all, |d| done(&d.id, d.id.as_str(), &bulk)));
        }
        if self.names.is_empty() {
            bail!("no container was given: name some, or --all");
        }
        let bulk = Bulk::new("containers", self.names.len());
        Ok(fail::for_each(&self.names, |name| done(&engine.find(name)?, name, &bulk)))
    }
}
