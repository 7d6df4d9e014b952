//! A container with sshd.

use crate::{Host, Terminal};

/// Starts container `a` with an sshd of the image `software`, and logs in from another container.
/// Returns its terminal with a shell prompt. The keys are made in a container: the host needs no
/// ssh.
#[track_caller]
pub fn log_in(host: &Host, options: &[&str]) -> Terminal {
    let keys = host.dir().join("keys");
    std::fs::create_dir(&keys).expect("made");
    let bind = format!("{}:/keys", keys.display());
    let make = ["run", "--rm", "-v", &bind, "software", "ssh-keygen", "-q", "-N", "", "-f"];
    host.dm(&[&make[..], &["/keys/key"]].concat()).ok();
    let serve = "mkdir -p /run/sshd /root/.ssh && ssh-keygen -A >/dev/null && \
                 cp /keys/key.pub /root/.ssh/authorized_keys && exec /usr/sbin/sshd -D -e";
    let run = ["run", "-d", "--name", "a", "-v", &bind];
    host.dm(&[&run[..], options, &["software", "sh", "-c", serve]].concat()).ok();
    host.wait_inside("a", "ss -tln | grep -q :22");
    let ssh = ["run", "--rm", "-it", "-v", &bind, "software", "ssh", "-tt", "-i", "/keys/key"];
    let words = ["-o", "StrictHostKeyChecking=no", "root@a"];
    let mut terminal = Terminal::spawn(&host.dormouse(&[&ssh[..], &words].concat()));
    terminal.expect("# ");
    terminal
}
