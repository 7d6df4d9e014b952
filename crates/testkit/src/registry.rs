//! A registry on the host's loopback: Debian's docker-registry.

use std::fs::File;
use std::process::{Child, Stdio};
use std::time::Duration;

use crate::host::Host;
use crate::process::{slowness, wait_until};

/// A running registry; it ends, and forgets, when it is dropped. Declare it after its host.
pub struct Registry {
    child: Child,
}

impl Registry {
    /// Where it listens, on the loopback of the host.
    pub const ADDRESS: &str = "127.0.0.1:5000";

    /// Starts one on a host.
    #[track_caller]
    pub fn start(host: &Host) -> Self {
        let dir = host.dir().join("registry");
        std::fs::create_dir_all(&dir).expect("the scratch directory can be written");
        let log = File::create(host.dir().join("registry.log")).expect("it can be written");
        let config = host.dir().join("registry.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n\
             storage: {{filesystem: {{rootdirectory: {}}}, delete: {{enabled: true}}}}\n\
             http: {{addr: \"{}\"}}\n",
            dir.display(),
            Self::ADDRESS
        );
        std::fs::write(&config, text).expect("it can be written");
        let child = host
            .command("docker-registry")
            .arg("serve")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(log.try_clone().expect("a file can be duplicated"))
            .stderr(log)
            .spawn()
            .expect("nsenter starts");
        let registry = Self { child };
        let url = format!("http://{}/v2/", Self::ADDRESS);
        let answers = || host.sh(&format!("exec busybox wget -q -O /dev/null {url}")).status == 0;
        let is_up = wait_until(Duration::from_secs(20) * slowness(), answers);
        let log = std::fs::read_to_string(host.dir().join("registry.log")).unwrap_or_default();
        assert!(is_up, "the registry does not answer:\n{log}");
        registry
    }

    /// The full name of an image in this registry.
    pub fn name(&self, repository: &str) -> String {
        format!("{}/{repository}", Self::ADDRESS)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill(); // ignored: it may have ended
        let _ = self.child.wait();
    }
}
