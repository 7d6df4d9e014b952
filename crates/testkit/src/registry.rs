//! A registry on the host's loopback: Debian's docker-registry.

use std::fs::File;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use crate::host::Host;
use crate::process::{run, soon, wait_until};

/// A running registry; its drop ends it and its contents. Declare it after its host.
pub struct Registry {
    child: Child,
}

impl Registry {
    /// The listening address, on the loopback of the host.
    pub const ADDRESS: &str = "127.0.0.1:5000";

    /// Starts a registry on a host.
    #[track_caller]
    pub fn start(host: &Host) -> Self {
        Self::serve(host.dir(), |program| host.command(program))
    }

    /// Starts a registry with all its state below `dir`. `command` returns commands in the network
    /// namespace of the listener.
    #[track_caller]
    pub fn serve(dir: &Path, command: impl Fn(&str) -> Command) -> Self {
        let storage = dir.join("registry");
        std::fs::create_dir_all(&storage).expect("the scratch directory can be written");
        let log = dir.join("registry.log");
        let output = File::create(&log).expect("write the file");
        let config = dir.join("registry.yml");
        let text = format!(
            "version: 0.1\nlog: {{level: error, accesslog: {{disabled: true}}}}\n\
             storage: {{filesystem: {{rootdirectory: {}}}, delete: {{enabled: true}}}}\n\
             http: {{addr: \"{}\"}}\n",
            storage.display(),
            Self::ADDRESS
        );
        std::fs::write(&config, text).expect("write the file");
        let child = command("docker-registry")
            .arg("serve")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(output.try_clone().expect("duplicate the file"))
            .stderr(output)
            .spawn()
            .expect("docker-registry starts");
        let registry = Self { child };
        let url = format!("http://{}/v2/", Self::ADDRESS);
        let answers = || {
            let mut fetch = command("busybox");
            fetch.args(["wget", "-q", "-O", "/dev/null", &url]);
            run(fetch, b"", Duration::from_secs(20)).status == 0
        };
        let is_up = wait_until(soon(), answers);
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
        let _ = self.child.kill(); // ignored: may have ended already
        let _ = self.child.wait();
    }
}
