//! The guest as a machine: its disk, its accelerator, and one boot with a script.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use dormouse_testkit::debian;

use super::kernel::{Kernel, META, NEXT_SUITE};
use super::output::output_of;
use crate::queue::Test;

/// Raised when the recipe of the guest changes.
const RECIPE: &str = "7";
/// What the guest's Debian has beside the smallest set.
const PACKAGES: &[&str] = &[
    "systemd-sysv",
    "dbus",
    "kmod",
    "iproute2",
    "nftables",
    "procps",
    "busybox-static",
    "e2fsprogs",
    "docker-registry",
];
/// What the guest says over its second port before it runs the command; after it, the command's status.
const UP: &str = "up";
/// Words of a kernel that met a fault of its own.
const FAULTS: &[&str] = &["BUG: ", "Oops: ", "Kernel panic", "RIP: ", "rcu: INFO", "Out of memory"];
/// What the guest's kernel says.
const CONSOLE: &str = "console.log";
/// LIMIT: time of the trial boot with KVM.
const TRIAL: Duration = Duration::from_secs(20);

/// The places of guests.
pub struct Guest {
    /// The repository.
    pub top: PathBuf,
    /// Files of this run: command, status, console.
    pub dir: PathBuf,
    /// Kernels and disks.
    pub cache: PathBuf,
}

/// How the guest's processors are executed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Accelerator {
    /// By the processor itself.
    Kvm,
    /// Emulated, each processor by a thread.
    Tcg,
    /// Emulated, all processors in turn by one thread: nothing is executed while it is rewritten.
    TcgInTurn,
}

impl Accelerator {
    fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
            Self::TcgInTurn => "tcg-in-turn",
        }
    }

    /// How many times slower than the host the guest may be before a test fails.
    fn slowness(self) -> u32 {
        match self {
            Self::Kvm => 2,
            Self::Tcg => 20,
            Self::TcgInTurn => 40,
        }
    }

    /// QEMU's words for it, with further words about the CPU, such as `,-avx2`.
    fn words(self, cpu: &str, has_cx16: bool) -> [String; 4] {
        let accel = match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
            Self::TcgInTurn => "tcg,thread=single",
        };
        let model = match (self, has_cx16) {
            (Self::Kvm, _) => "host",
            // Without la57 the kernel walks four levels of page tables, not five.
            (_, true) => "max,-la57",
            // Without cx16 it takes a slow path that emulation runs faster than the fast one.
            (_, false) => "max,-cx16,-la57",
        };
        ["-accel".into(), accel.into(), "-cpu".into(), format!("{model}{cpu}")]
    }
}

/// What one boot consists of.
pub struct Machine<'g> {
    /// Its kernel and disk.
    pub kernel: &'g Kernel,
    /// Further words about its CPU, such as `,-avx2`.
    pub cpu: &'g str,
    /// The CPU has the instruction CMPXCHG16B. KERNEL(6.19): without it, BPF programs get no timer and no memory of a
    /// task (`kmalloc_nolock()`).
    pub has_cx16: bool,
    /// How its processors are executed.
    pub accelerator: Accelerator,
}

impl Guest {
    /// The kernel that the tests run under.
    pub fn own_kernel(&self) -> Kernel {
        Kernel::own(&self.cache)
    }

    /// A newer kernel.
    pub fn next_kernel(&self) -> Kernel {
        Kernel::next(&self.cache)
    }

    /// Makes a kernel and its disk unless the cache holds them, made by this recipe.
    pub fn prepare(&self, kernel: &Kernel) -> Result<()> {
        fs::create_dir_all(&self.cache)
            .with_context(|| format!("making {}", self.cache.display()))?;
        let lock = fs::File::create(self.cache.join("lock")).context("the cache's lock")?;
        lock.lock().context("locking the cache")?;
        let recipe = format!("{RECIPE} {META} {NEXT_SUITE} {}", PACKAGES.join(" "));
        let mark = kernel.place("recipe");
        if fs::read_to_string(&mark).is_ok_and(|made| made == recipe) {
            return Ok(());
        }
        println!("guest: making a kernel and its disk in {}, once", self.cache.display());
        let _ = fs::remove_file(&mark); // absent on the first run
        kernel.download().context("downloading a kernel")?;
        self.make_image(kernel).context("making the guest's disk")?;
        fs::write(&mark, recipe).context("writing the mark")
    }

    fn make_image(&self, kernel: &Kernel) -> Result<()> {
        let tree = self.cache.join("tree");
        let _ = fs::remove_dir_all(&tree); // absent unless a run was interrupted
        debian::bootstrap(PACKAGES, &tree, &[]);
        fs::create_dir_all(tree.join("lib/modules"))?;
        let mut copy = Command::new("cp");
        copy.arg("-a").arg(kernel.modules()?).arg(tree.join("lib/modules/"));
        output_of(copy)?;
        let mut depmod = Command::new("chroot");
        depmod.arg(&tree).args(["depmod", &kernel.version()?]);
        output_of(depmod)?;
        write_tree(&tree)?;
        let image = kernel.place("img");
        let _ = fs::remove_file(&image); // absent on the first run
        let mut mke2fs = Command::new("mke2fs");
        mke2fs.args(["-q", "-t", "ext4", "-E", "root_owner=0:0", "-d"]);
        mke2fs.arg(&tree).arg(&image).arg("8G");
        output_of(mke2fs)?;
        fs::remove_dir_all(&tree)?;
        Ok(())
    }

    /// KVM where a trial boot with it ends well, else emulation. `DORMOUSE_GUEST_ACCEL` (`kvm`, `tcg`, `tcg-in-turn`)
    /// decides without a trial. The result holds for one boot of the machine.
    pub fn accelerator(&self, kernel: &Kernel) -> Result<Accelerator> {
        let parse = |name: &str| match name.trim() {
            "kvm" => Some(Accelerator::Kvm),
            "tcg" => Some(Accelerator::Tcg),
            "tcg-in-turn" => Some(Accelerator::TcgInTurn),
            _ => None,
        };
        if let Ok(name) = std::env::var("DORMOUSE_GUEST_ACCEL") {
            return parse(&name)
                .with_context(|| format!("DORMOUSE_GUEST_ACCEL={name}: kvm, tcg or tcg-in-turn"));
        }
        if !Path::new("/dev/kvm").exists() {
            return Ok(Accelerator::Tcg);
        }
        let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").context("the boot id")?;
        let mark = self.cache.join("accelerator");
        let known = fs::read_to_string(&mark).unwrap_or_default();
        if let Some(known) = known.strip_prefix(boot.trim()).and_then(parse) {
            return Ok(known);
        }
        let machine = Machine { kernel, cpu: "", has_cx16: true, accelerator: Accelerator::Kvm };
        let trial = self.boot_once(&machine, "true\n", TRIAL);
        let is_good = trial.is_ok_and(|ended| ended.status() == Some(0));
        let found = if is_good { Accelerator::Kvm } else { Accelerator::Tcg };
        println!(
            "guest: a trial boot with KVM {}",
            if is_good { "worked" } else { "failed: emulated" }
        );
        fs::write(&mark, format!("{} {}", boot.trim(), found.name()))
            .context("writing the mark")?;
        Ok(found)
    }

    /// A script that runs the tests without the `green` ones, by a list beside it.
    pub fn test_script(&self, tests: &[Test], green: &[&str]) -> Result<String> {
        let left: Vec<&Test> =
            tests.iter().filter(|test| !green.contains(&test.full_name().as_str())).collect();
        if left.is_empty() {
            return Ok("true\n".to_owned());
        }
        let list = self.dir.join("tests.json");
        fs::write(&list, serde_json::to_vec(&left)?)?;
        // The build of the tests may have replaced this program.
        let this = std::env::current_exe()?.display().to_string();
        let (this, list) = (this.trim_end_matches(" (deleted)"), list.display().to_string());
        let durations = self.top.join(crate::duration::PATH);
        Ok(format!(
            "{this} queue --list {list} --durations {} --report \"$REPORT\"\n",
            durations.display(),
        ))
    }

    /// Boots, runs the script and returns its status.
    ///
    /// An emulated machine that ended without a status is started once more, after its output was printed, with its
    /// processors in turn: a fault of the emulator does not come back then, and one of ours does. The tests that passed
    /// are left out.
    pub fn boot(
        &self,
        machine: &Machine<'_>,
        script: &dyn Fn(&[&str]) -> Result<String>,
        limit: Duration,
    ) -> Result<i32> {
        let started = Instant::now();
        let mut ended = self.boot_once(machine, &script(&[])?, limit)?;
        let has_ended = ended.qemu.is_some() && ended.status().is_none();
        if has_ended && machine.accelerator == Accelerator::Tcg {
            let death = self.death();
            println!(
                "{}\nguest: it ended without a status: once more{death}",
                self.last_words(&ended)
            );
            let left = limit.saturating_sub(started.elapsed());
            let machine = Machine { accelerator: Accelerator::TcgInTurn, ..*machine };
            ended = self.boot_once(&machine, &script(&ended.green())?, left)?;
        }
        let took = started.elapsed().as_secs();
        if ended.qemu.is_none() {
            println!("{}", self.last_words(&ended));
            bail!("the guest was switched off after {took} s, its limit (--limit-s)");
        }
        let Some(status) = ended.status() else {
            println!("{}", self.last_words(&ended));
            bail!("the guest ended without a status{}", self.death());
        };
        println!("guest: status {status} after {took} s");
        Ok(status)
    }

    /// What the guest's kernel said of its own faults, for the end of a message.
    fn death(&self) -> String {
        let console = fs::read(self.dir.join(CONSOLE)).unwrap_or_default();
        let console = String::from_utf8_lossy(&console);
        let is_fault = |line: &&str| FAULTS.iter().any(|fault| line.contains(fault));
        let faults: Vec<&str> = console.lines().filter(is_fault).take(20).collect();
        if faults.is_empty() { String::new() } else { format!(":\n{}", faults.join("\n")) }
    }

    /// The outputs that show the cause of an unexpected end.
    fn last_words(&self, ended: &Ended) -> String {
        let mut words = match ended.qemu {
            Some(status) => format!("QEMU: {status}"),
            None => "its time was up".to_owned(),
        };
        for name in [CONSOLE, "virtiofsd.err"] {
            let path = self.dir.join(name);
            let text = fs::read(&path).unwrap_or_default();
            let text = String::from_utf8_lossy(&text);
            let lines: Vec<&str> = text.lines().collect();
            let last = &lines[lines.len().saturating_sub(40)..];
            words.push_str(&format!("\n{}:\n{}", path.display(), last.join("\n")));
        }
        words
    }

    /// Boots once, runs the script, and waits for the end.
    fn boot_once(&self, machine: &Machine<'_>, script: &str, limit: Duration) -> Result<Ended> {
        let head = format!(
            "export DORMOUSE_TEST_SLOWNESS={} HOME=/root\ncd {}\n",
            machine.accelerator.slowness(),
            self.top.display()
        );
        fs::write(self.dir.join("command"), head + script)?;
        let path = |name: &str| self.dir.join(name);
        let text = |name: &str| path(name).display().to_string();
        let disk = machine.kernel.place("img").display().to_string();
        let _ = fs::remove_file(path("status")); // ignored: it may be absent
        // A socket's path has at most 107 bytes; the repository's may be longer.
        let sockets = tempfile::Builder::new().prefix("dm-guest-").tempdir()?;
        let socket = sockets.path().join("share");
        let share = Running(
            Command::new(virtiofsd()?)
                .arg(format!("--socket-path={}", socket.display()))
                .args(["-o", &format!("source={}", self.top.display())])
                .args(["-o", "cache=always", "-o", "xattr"])
                .stdin(Stdio::null())
                .stdout(fs::File::create(path("virtiofsd.log"))?)
                .stderr(fs::File::create(path("virtiofsd.err"))?)
                .spawn()
                .context("starting virtiofsd")?,
        );
        let waited = Instant::now();
        while !socket.exists() {
            ensure!(waited.elapsed() < Duration::from_secs(10), "virtiofsd opens no socket");
            thread::sleep(Duration::from_millis(20));
        }
        // What Debian's kernel does against attackers and mistakes costs more than the tests do.
        let kernel_line = format!(
            "root=/dev/nvme0n1 rw console=ttyS0 quiet mitigations=off init_on_alloc=0 \
             randomize_kstack_offset=off audit=0 nowatchdog net.ifnames=0 panic=-1 \
             systemd.show_status=0 house.dir={}",
            self.top.display()
        );
        let mut qemu = Command::new("qemu-system-x86_64");
        qemu.args(["-machine", "q35"])
            .args(machine.accelerator.words(machine.cpu, machine.has_cx16))
            .args(["-smp", "2", "-m", "4G", "-no-reboot", "-nodefaults", "-display", "none"])
            .args(["-object", "memory-backend-memfd,id=memory,size=4G,share=on"])
            .args(["-numa", "node,memdev=memory"])
            .args(["-chardev", &format!("socket,id=share,path={}", socket.display())])
            .args(["-device", "vhost-user-fs-pci,chardev=share,tag=house"])
            .args(["-drive", &format!("file={disk},format=raw,if=none,id=root")])
            .args(["-snapshot", "-device", "nvme,drive=root,serial=root"])
            .args(["-chardev", &format!("file,id=console,path={}", text(CONSOLE))])
            .args(["-serial", "chardev:console", "-device", "virtio-serial-pci"])
            .args([
                "-chardev",
                "file,id=out,path=/dev/stdout,append=on",
                "-device",
                "virtserialport,chardev=out",
            ])
            .args(["-chardev", &format!("file,id=status,path={}", text("status"))])
            .args(["-device", "virtserialport,chardev=status"])
            .args(["-device", "virtio-rng-pci"])
            .arg("-kernel")
            .arg(machine.kernel.image()?)
            .args(["-append", &kernel_line])
            .env("TMPDIR", &self.dir)
            .stdin(Stdio::null())
            .stdout(Stdio::piped());
        let mut qemu = Running(qemu.spawn().context("starting QEMU")?);
        // By a pipe: a file would be opened anew, and what we print written over what it prints.
        let mut output = qemu.0.stdout.take().context("QEMU without an output")?;
        let copied = thread::spawn(move || io::copy(&mut output, &mut io::stdout()));
        let status = qemu.wait(limit)?;
        drop(qemu);
        drop(share);
        copied.join().expect("copying does not panic").context("passing on what the guest says")?;
        let status_file = fs::read_to_string(path("status")).unwrap_or_default();
        Ok(Ended { qemu: status, status_file })
    }
}

/// How a boot ended.
struct Ended {
    /// QEMU's status, or that it had to be switched off.
    qemu: Option<ExitStatus>,
    /// What came over the guest's second port.
    status_file: String,
}

impl Ended {
    fn status(&self) -> Option<i32> {
        self.status_file.strip_prefix(UP)?.lines().last()?.parse().ok()
    }

    /// The tests that have passed, where it did not come to its status.
    fn green(&self) -> Vec<&str> {
        self.status_file.lines().skip(1).collect()
    }
}

/// A child that ends when it is no longer wanted.
struct Running(Child);

impl Running {
    /// Its status, if it ended within `limit`.
    fn wait(&mut self, limit: Duration) -> Result<Option<ExitStatus>> {
        let start = Instant::now();
        while start.elapsed() < limit {
            if let Some(status) = self.0.try_wait()? {
                return Ok(Some(status));
            }
            thread::sleep(Duration::from_millis(50));
        }
        Ok(None)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill(); // ignored: it may have ended
        let _ = self.0.wait();
    }
}

fn virtiofsd() -> Result<&'static str> {
    let places = ["/usr/lib/qemu/virtiofsd", "/usr/libexec/virtiofsd"];
    let found = places.into_iter().find(|path| Path::new(path).is_file());
    found.context("no virtiofsd: install qemu-system-x86")
}

/// The files that make the guest run one command and go.
fn write_tree(tree: &Path) -> Result<()> {
    let unit = "[Unit]\nDescription=Runs one command of the host\n\
                After=basic.target\nFailureAction=poweroff-immediate\n\n\
                [Service]\nType=oneshot\nExecStart=/usr/local/sbin/house\n\
                TimeoutStartSec=infinity\nLimitNOFILE=65536\n\n\
                [Install]\nWantedBy=multi-user.target\n";
    let script = "#!/bin/sh\n\
        dir=$(sed -n 's/.*house\\.dir=\\([^ ]*\\).*/\\1/p' /proc/cmdline)\n\
        mkdir -p \"$dir\"\n\
        # Their drivers are loaded by udev, for which nothing here has waited.\n\
        for i in $(seq 100); do\n\
        out=$(echo /dev/vport*p1)\n\
        [ -c \"$out\" ] && [ -c \"${out%1}2\" ] && break\n\
        sleep 0.1\n\
        done\n\
        exec >/dev/console 2>&1 # until there is a better place\n\
        mount -t virtiofs -o ro house \"$dir\" || exit\n\
        [ -c \"$out\" ] || { echo \"no port: $out\"; exit 1; }\n\
        # The scheduler asks at each switch whether anybody has a quota, by a jump that is rewritten when the\n\
        # first one comes and the last one goes, while the other processor runs it: an emulator gets that wrong\n\
        # now and then. So somebody always has one.\n\
        echo +cpu >/sys/fs/cgroup/cgroup.subtree_control\n\
        mkdir /sys/fs/cgroup/quota && echo 100000 >/sys/fs/cgroup/quota/cpu.max\n\
        export REPORT=\"${out%1}2\"\n\
        echo up >\"$REPORT\"\n\
        exec >\"$out\" 2>&1 </dev/null\n\
        echo \"guest: $(uname -r), up after $(cut -d' ' -f1 /proc/uptime) s\"\n\
        sh \"$dir/target/guest/command\"\n\
        echo $? >\"$REPORT\"\n\
        systemctl poweroff --force --force\n";
    let write = |path: &str, text: &str| fs::write(tree.join(path), text);
    write("etc/systemd/system/house.service", unit)?;
    write("usr/local/sbin/house", script)?;
    write("etc/fstab", "")?;
    write("etc/hostname", "guest\n")?;
    let program = tree.join("usr/local/sbin/house");
    fs::set_permissions(program, std::os::unix::fs::PermissionsExt::from_mode(0o755))?;
    let wanted = tree.join("etc/systemd/system/multi-user.target.wants");
    fs::create_dir_all(&wanted)?;
    std::os::unix::fs::symlink("/etc/systemd/system/house.service", wanted.join("house.service"))?;
    // Nothing of these is needed to run one command.
    for unit in [
        "systemd-timesyncd.service",
        "apt-daily.timer",
        "apt-daily-upgrade.timer",
        "dpkg-db-backup.timer",
        "e2scrub_all.timer",
        "e2scrub_reap.service",
        "fstrim.timer",
        "docker-registry.service",
        "nftables.service",
        "getty@tty1.service",
        "serial-getty@ttyS0.service",
        "systemd-random-seed.service",
        "systemd-journal-flush.service",
    ] {
        let mask = tree.join("etc/systemd/system").join(unit);
        let _ = fs::remove_file(&mask); // ignored: it may be absent
        std::os::unix::fs::symlink("/dev/null", mask)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::Ended;

    #[test]
    fn what_was_green_is_not_run_again_and_no_status_is_none() {
        let ended = |text: &str| Ended { qemu: None, status_file: text.into() };
        let died = ended("up\nsoftware::one\nerrors::two\n");
        assert_eq!((died.status(), died.green()), (None, vec!["software::one", "errors::two"]));
        assert_eq!(ended("up\nsoftware::one\n1\n").status(), Some(1));
        for text in ["", "up\n", "1\n"] {
            assert_eq!(ended(text).status(), None, "{text:?}");
        }
    }
}
