//! UTS namespaces (uts_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

/// One of them. A name that is missing is the container's own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uts {
    /// The name of the host.
    #[serde(default)]
    pub hostname: Option<String>,
    /// Its NIS domain.
    #[serde(default)]
    pub domainname: Option<String>,
}
