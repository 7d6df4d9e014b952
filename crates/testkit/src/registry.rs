//! A registry on the host's loopback: Debian's docker-registry.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::host::Host;
use crate::process::{run, slowness, wait_until};

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
        Self::serve(host.dir(), |program| host.command(program))
    }

    /// Starts one that keeps everything below `dir`. `command` gives commands that run where it is to
    /// listen.
    #[track_caller]
    pub fn serve(dir: &Path, command: impl Fn(&str) -> Command) -> Self {
        let storage = dir.join("registry");
        std::fs::create_dir_all(&storage).expect("the scratch directory can be written");
        let log = dir.join("registry.log");
        let output = File::create(&log).expect("it can be written");
        let config = dir.join("registry.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n\
             storage: {{filesystem: {{rootdirectory: {}}}, delete: {{enabled: true}}}}\n\
             http: {{addr: \"{}\"}}\n",
            storage.display(),
            Self::ADDRESS
        );
        std::fs::write(&config, text).expect("it can be written");
        let child = command("docker-registry")
            .arg("serve")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("a file can be duplicated"))
            .stderr(output)
            .spawn()
            .expect("docker-registry starts");
        let registry = Self { child };
        let url = format!("http://{}/v2/", Self::ADDRESS);
        let answers = || {
            let mut ask = command("busybox");
            ask.args(["wget", "-q", "-O", "/dev/null", &url]);
            run(ask, b"", Duration::from_secs(20)).status == 0
        };
        let is_up = wait_until(Duration::from_secs(20) * slowness(), answers);
        let log = std::fs::read_to_string(log).unwrap_or_default();
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
