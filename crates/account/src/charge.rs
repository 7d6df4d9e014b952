//! Charges: readings of a life's counters, on their way to a balance.

use std::fmt;
use std::str::FromStr;

use dormouse_model::{ContainerId, Invalid, Name};
use serde::{Deserialize, Serialize};

use crate::number::Number;
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
    /// The cgroup. KERNEL(5.5): 64 bits, which a boot does not use again; that of a later life is larger
    /// (fs/kernfs/dir.c, kernfs_new_node).
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

/// An account that a container has worked for, as the gates in the kernel know it, written
/// `NUMBER/OWNER/LOAD`.
///
/// A client is known by one key as long as a life that worked for it lasts, whatever happens to its container, its name
/// or its balance meanwhile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct Client {
    /// Its number.
    pub number: Number,
    /// Of a container's own account, the first eight bytes of the container's id; of an account with a number of the
    /// operator's choice, when it was made; else 0. The number alone may be another one's after a removal.
    pub owner: u64,
    /// The load of the gates that have counted, as a number that this boot uses once.
    pub load: u32,
}

impl Client {
    /// Returns the owner of the own account of a container.
    pub fn owner(container: &ContainerId) -> u64 {
        container.as_str().get(..16).and_then(|hex| u64::from_str_radix(hex, 16).ok()).unwrap_or(0)
    }
}

impl fmt::Display for Client {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{:016x}/{}", self.number, self.owner, self.load)
    }
}

impl FromStr for Client {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let read = || {
            let mut parts = text.split('/');
            let number = Number(parts.next()?.parse().ok()?);
            let owner = parts.next().filter(|hex| hex.len() == 16)?;
            let owner = u64::from_str_radix(owner, 16).ok()?;
            let load = parts.next()?.parse().ok()?;
            parts.next().is_none().then_some(Self { number, owner, load })
        };
        read().ok_or_else(|| Invalid::new("client", text, "NUMBER/OWNER/LOAD"))
    }
}

impl TryFrom<String> for Client {
    type Error = Invalid;
    fn try_from(text: String) -> Result<Self, Invalid> {
        text.parse()
    }
}

impl From<Client> for String {
    fn from(client: Client) -> String {
        client.to_string()
    }
}

/// The work of a life for another account, a part of the time of the life.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Work {
    /// The account.
    #[serde(rename = "for")]
    pub client: Client,
    /// CPU time.
    pub cpu_ns: u64,
}

/// Reduces work to the CPU time of the life, each part in proportion. The cgroup's counter lags behind that of the
/// gates by up to a tick while processes run.
pub fn fit(work: &mut [Work], cpu_ns: u64) {
    let sum: u128 = work.iter().map(|one| u128::from(one.cpu_ns)).sum();
    if sum > u128::from(cpu_ns) {
        for one in work {
            // At most what it was.
            one.cpu_ns = (u128::from(one.cpu_ns) * u128::from(cpu_ns) / sum) as u64;
        }
    }
}

/// What a life has at the time of a reading.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Held {
    /// Processes and threads.
    pub tasks: u64,
    /// Sockets, as far as they are counted.
    pub sockets: u64,
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
    /// What of their CPU time was work for other accounts, each of them once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub work: Vec<Work>,
    /// What it has now. In a file are the charges of ended lives, which have nothing.
    #[serde(skip)]
    pub held: Held,
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
        Charge {
            to: Holder::Own(container),
            life,
            unix_ms: 12,
            usage,
            work: Vec::new(),
            held: Held::default(),
        }
    }

    fn work(number: u32, cpu_ns: u64) -> Work {
        Work { client: Client { number: Number(number), owner: 7, load: 9 }, cpu_ns }
    }

    #[test]
    fn work_fits_into_the_time_of_its_life() {
        let mut all = [work(1, 30), work(2, 10)];
        fit(&mut all, 40);
        assert_eq!(all, [work(1, 30), work(2, 10)]);
        fit(&mut all, 21);
        assert_eq!(all, [work(1, 15), work(2, 5)]);
        fit(&mut all, 0);
        assert_eq!(all, [work(1, 0), work(2, 0)]);
        let mut all = [work(1, u64::MAX), work(2, u64::MAX)];
        fit(&mut all, u64::MAX);
        assert_eq!(all[0].cpu_ns, u64::MAX / 2);
        fit(&mut [], 0);
    }

    #[test]
    fn client_is_read_or_refused() {
        let client = Client { number: Number(65_540), owner: 0xab, load: 3 };
        assert_eq!(client.to_string(), "65540/00000000000000ab/3");
        assert_eq!(client.to_string().parse(), Ok(client));
        for bad in ["", "1", "1/0000000000000000", "1/0/3", "1/0000000000000000/3/4", "x/y/z"] {
            assert!(bad.parse::<Client>().is_err(), "{bad}");
        }
        let id = "0123456789abcdef0123456789abcdef".parse().unwrap();
        assert_eq!(Client::owner(&id), 0x0123_4567_89ab_cdef);
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
        one.work = vec![work(1, 2)];
        let parts = "\"work\":[{\"for\":\"1/0000000000000007/9\",\"cpu_ns\":2}]}";
        assert!(one.line().trim().ends_with(parts), "{}", one.line());
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
