//! The processes of a checkpoint in the place of a program: the part of a `create` that is a restore
//! ([`crate::restore`] has the theory).

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::thread::JoinHandle;

use dormouse_checkpoint::load::{self, Allowed, Traced, Wanted};
use dormouse_kernel::weakened;
use dormouse_launch::{Newborn, Plan};
use dormouse_parcel::Reader;

use crate::bundle::Bundle;
use crate::checkpoint::{STREAMS, memory, own_network};
use crate::descriptor::clone_fd;
use crate::error::{Error, Result};
use crate::filter::Compiled;
use crate::identity::Ids;
use crate::namespace::Namespaces;
use crate::process;
use crate::spec::Process;

/// A checkpoint to be restored.
pub(crate) struct Comeback {
    pub(crate) reader: Arc<Reader>,
    pub(crate) connections: bool,
}

/// The configuration of the restored container.
pub(crate) struct Confined<'c> {
    pub(crate) bundle: &'c Bundle,
    pub(crate) process: &'c Process,
    pub(crate) filter: Option<&'c Compiled>,
    pub(crate) ids: &'c Ids,
}

impl Comeback {
    /// Refuses a bundle whose containers cannot be restored.
    pub(crate) fn check(&self, bundle: &Bundle, process: &Process) -> Result<()> {
        let namespaces = Namespaces::check(&bundle.linux().namespaces)?;
        for word in ["pid", "mount"] {
            if !namespaces.makes(word) {
                let why = format!("a container that is restored needs a new {word} namespace");
                return Err(Error::field("linux.namespaces", why));
            }
        }
        let labels = [
            ("apparmor", "process.apparmorProfile", &process.apparmor_profile),
            ("selinux", "process.selinuxLabel", &process.selinux_label),
        ];
        for (module, field, label) in labels {
            if label.as_deref().is_some_and(|l| !l.is_empty()) && process::is_active(module) {
                return Err(Error::field(field, "restored processes do not get it yet"));
            }
        }
        if bundle.linux().seccomp.as_ref().is_some_and(|s| s.listener_path.is_some()) {
            let why = "a restored process cannot have a filter with a listener";
            return Err(Error::field("linux.seccomp.listenerPath", why));
        }
        Ok(())
    }

    /// Starts the comparison of the contents with their checksums, concurrent with the rest.
    pub(crate) fn verify(&self) -> JoinHandle<dormouse_checkpoint::Result<()>> {
        let reader = Arc::clone(&self.reader);
        std::thread::spawn(move || reader.verify())
    }

    /// Adds the last part of the plan, which replaces the program.
    pub(crate) fn plan(&self, plan: &mut Plan, confined: &Confined<'_>) -> Result<load::Restore> {
        let Confined { bundle, process, filter, ids } = confined;
        let user = &process.user;
        let granted = process::capabilities(process.capabilities.as_ref());
        let namespaces = Namespaces::check(&bundle.linux().namespaces)?;
        let allowed = Allowed {
            has_init: false,
            // The capabilities that execve(2) could give a program of root, or keep.
            capabilities: granted.bounding | granted.inheritable | granted.ambient,
            ambient: granted.ambient,
            inheritable: granted.inheritable,
            uid: user.uid,
            gid: user.gid,
            groups: user.additional_gids.clone(),
            ids: ids.count_from_zero(),
            memory: memory(&bundle.spec.mounts),
            own_network: own_network(&bundle.spec),
            own_names: namespaces.makes("uts"),
            own_ipc: namespaces.makes("ipc"),
            cgroups: false,
            user_namespaces: filter.is_none_or(|filter| filter.user_namespaces),
            chroots: filter.is_none_or(|filter| filter.chroots),
            no_new_privileges: process.no_new_privileges,
            held: Vec::new(),
            console: process.terminal,
            addresses: Vec::new(),
            beside: false,
            passed_ns: 0,
        };
        let mut restore = load::prepare(&self.reader, allowed, load::Memory::Own)?;
        if self.connections {
            restore.end_quiet(&self.reader.records().about.container);
        }
        let streams = match process.terminal {
            true => None,
            false => Some(process::own_streams(ids, user.uid)?),
        };
        let follow = restore.follow(|wanted| match wanted {
            Wanted::Outside(name) => stream(streams.as_ref(), name),
            Wanted::Held(_) => Err(Error::Usage("nothing was held".into())),
            Wanted::Userfaults => Err(Error::Usage("all memory is read at once".into())),
        })?;
        plan.sync();
        if process.no_new_privileges && !weakened("no-new-privs") {
            plan.no_new_privs();
        }
        if let Some(filter) = filter.filter(|_| !weakened("seccomp")) {
            plan.seccomp_with(&filter.program, filter.flags, None);
        }
        plan.follow(follow);
        Ok(restore)
    }
}

/// Duplicates a standard stream of the caller by its name.
fn stream(streams: Option<&[OwnedFd; 3]>, name: &str) -> Result<OwnedFd> {
    let at = STREAMS.iter().position(|known| *known == name);
    match (at, streams) {
        (Some(at), Some(streams)) => clone_fd(streams[at].as_fd()),
        (Some(_), None) => {
            let why = "the checkpoint has streams of the caller, and no terminal";
            Err(Error::field("process.terminal", why))
        }
        (None, _) => {
            let why = format!("the checkpoint is of no OCI container: it has a stream '{name}'");
            Err(Error::Usage(why))
        }
    }
}

/// Conducts a ready newborn through its restore, and releases it.
pub(crate) fn conduct(
    newborn: Newborn,
    restore: &load::Restore,
    console: Option<BorrowedFd<'_>>,
    verified: JoinHandle<dormouse_checkpoint::Result<()>>,
) -> Result<()> {
    // ORDER: traced, then released: until it is complete, its death follows ours.
    let traced = Traced::seize(newborn.pid)?;
    newborn.go()?;
    let checked = || match verified.join() {
        Ok(checked) => checked,
        Err(panic) => std::panic::resume_unwind(panic),
    };
    // No process of the runtime stays: all memory is read at once.
    let mut fill = |_| Err("no process fills memory later".to_owned());
    Ok(traced.conduct(restore, console, checked, &mut fill)?)
}
