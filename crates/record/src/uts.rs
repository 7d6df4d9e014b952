//! UTS namespaces (uts_namespaces(7)) that processes have made for themselves.

use serde::{Deserialize, Serialize};

/// One namespace. A missing name is the container's own.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Uts {
    /// The host name.
    #[serde(default)]
    pub hostname: Option<String>,
    /// The NIS domain name.
    #[serde(default)]
    pub domainname: Option<String>,
}
