//! `features`: the supported features, in the format of runtime-spec 1.2.

use dormouse_kernel::capability::Capability;
use serde_json::{Value, json};

use crate::{OCI_VERSION, filter, mount, namespace};

/// Returns the document.
pub(crate) fn document() -> Value {
    let mut namespaces: Vec<&str> = namespace::kinds().collect();
    namespaces.sort_unstable();
    let capabilities = Capability::ALL.iter().map(|c| format!("CAP_{}", c.name()));
    let flags: Vec<&str> = filter::FLAGS.iter().map(|(name, _)| *name).collect();
    json!({
        "ociVersionMin": "1.0.0",
        "ociVersionMax": OCI_VERSION,
        "hooks": [
            "prestart", "createRuntime", "createContainer", "startContainer", "poststart",
            "poststop",
        ],
        "mountOptions": mount::known_options(),
        "linux": {
            "namespaces": namespaces,
            "capabilities": capabilities.collect::<Vec<_>>(),
            "cgroup": {
                "v1": true, "v2": true, "systemd": false, "systemdUser": false, "rdma": true,
            },
            "seccomp": {
                "enabled": true,
                "actions": filter::ACTIONS,
                "operators": filter::OPERATORS,
                "archs": filter::ARCHITECTURES,
                "knownFlags": flags,
                "supportedFlags": flags,
            },
            "apparmor": { "enabled": true },
            "selinux": { "enabled": true },
            "intelRdt": { "enabled": false },
            "mountExtensions": { "idmap": { "enabled": true } },
        },
        "annotations": {
            "org.opencontainers.runtime-spec.features": "1.2.1",
            "dev.dormouse.version": env!("CARGO_PKG_VERSION"),
        },
        "potentiallyUnsafeConfigAnnotations": [],
    })
}
