//! Charges: readings of a life's counters, on their way to a balance.

use std::fmt;
use std::str::FromStr;

use dormouse_model::{ContainerId, Invalid, Name};
use serde::{Deserialize, Serialize};

use crate::usage::Usage;

/// The account that a charge belongs to.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Holder {
    /// The root account.
    Root,
    /// The own account of a container.
    Own(ContainerId),
    /// An account that an operator has made.
    Made(Name),
}

/// One life of a container: from the creation of its cgroup to its removal.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Life {
    /// The container.
    pub container: ContainerId,
    /// The boot of the host (proc_sys_kernel(5), random/boot_id).
    pub boot: String,
    /// The cgroup. KERNEL(5.5): 64 bits, which a boot does not use again.
    pub cgroup: u64,
}

impl fmt::Display for Life {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.container, self.boot, self.cgroup)
    }
}

impl FromStr for Life {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let bad = || Invalid::new("life", text, "CONTAINER/BOOT/CGROUP");
        let mut parts = text.split('/');
        let mut part = || parts.next().ok_or_else(bad);
        let (container, boot, cgroup) = (part()?.parse()?, part()?.to_owned(), part()?);
        let life = Self { container, boot, cgroup: cgroup.parse().map_err(|_| bad())? };
        if parts.next().is_some() { Err(bad()) } else { Ok(life) }
    }
}

impl TryFrom<String> for Life {
    type Error = Invalid;
    fn try_from(text: String) -> Result<Self, Invalid> {
        text.parse()
    }
}

impl From<Life> for String {
    fn from(life: Life) -> String {
        life.to_string()
    }
}

/// A reading of the counters of one life, since its beginning.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Charge {
    /// The account.
    pub to: Holder,
    /// The life.
    pub life: Life,
    /// The time of the reading, in milliseconds since the epoch.
    pub unix_ms: i64,
    /// The counters.
    pub usage: Usage,
}

impl Charge {
    /// Returns the charge as a line of a file, with a line feed on both sides: a line that a killed writer has
    /// cut short does not reach into the next one.
    pub fn line(&self) -> String {
        let text = serde_json::to_string(self).expect("texts and numbers can be written");
        format!("\n{text}\n")
    }

    /// Reads all lines of a file, and counts those that are no charges.
    pub fn read_all(bytes: &[u8]) -> (Vec<Self>, usize) {
        let lines = bytes.split(|b| *b == b'\n').filter(|line| !line.is_empty());
        let (mut charges, mut damaged) = (Vec::new(), 0);
        for line in lines {
            match serde_json::from_slice(line) {
                Ok(charge) => charges.push(charge),
                Err(_) => damaged += 1,
            }
        }
        (charges, damaged)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn charge(cgroup: u64) -> Charge {
        let container = ContainerId::from_bytes([7; 16]);
        let life = Life { container: container.clone(), boot: "b-1".into(), cgroup };
        let usage = Usage { cpu_ns: 5, lives: 1, ..Usage::default() };
        Charge { to: Holder::Own(container), life, unix_ms: 12, usage }
    }

    #[test]
    fn line_cut_short_loses_only_itself() {
        let (a, b) = (charge(1), charge(u64::MAX));
        let whole = a.line();
        for end in 0..whole.len() {
            let text = whole[..end].to_owned() + &b.line();
            let (read, damaged) = Charge::read_all(text.as_bytes());
            assert_eq!(read.last(), Some(&b), "{end}");
            assert_eq!(read.len() + damaged, if end < 2 { 1 } else { 2 }, "{end}");
        }
        let (read, damaged) =
            Charge::read_all(format!("{}\u{0}x\n{}", a.line(), b.line()).as_bytes());
        assert_eq!((read, damaged), (vec![a, b], 1));
    }

    #[test]
    fn form_on_disk_is_fixed() {
        let mut one = charge(3);
        let id = "07".repeat(16);
        let line = format!(
            "{{\"to\":{{\"own\":\"{id}\"}},\"life\":\"{id}/b-1/3\",\"unix_ms\":12,\
             \"usage\":{{\"cpu_ns\":5,\"lives\":1}}}}"
        );
        assert_eq!(one.line().trim(), line);
        one.to = Holder::Root;
        assert!(one.line().contains("\"to\":\"root\""));
        one.to = Holder::Made("web".parse().unwrap());
        assert!(one.line().contains("\"to\":{\"made\":\"web\"}"));
    }

    #[test]
    fn life_is_read_or_refused() {
        let id = "07".repeat(16);
        assert!(format!("{id}/x/1").parse::<Life>().is_ok());
        for bad in ["", "x/x/1", &format!("{id}/x"), &format!("{id}/x/y"), &format!("{id}/x/1/2")] {
            assert!(bad.parse::<Life>().is_err(), "{bad}");
        }
    }
}
