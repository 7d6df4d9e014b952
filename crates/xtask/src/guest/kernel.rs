//! The guest's kernels: Debian's, downloaded and unpacked with an apt configuration of our own.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, ensure};
use dormouse_testkit::debian;

use super::output::output_of;

/// The package that depends on the newest kernel of a suite.
pub const META: &str = "linux-image-cloud-amd64";
/// What the packages are called that a kernel and its modules are in: one, or several since 7.3.
const PARTS: [&str; 4] = ["linux-image-", "linux-base-", "linux-binary-", "linux-modules-"];
/// The release after the machine's own, whose kernel is the newest there is.
pub const NEXT_SUITE: &str = "trixie-backports";

/// A kernel, or the place where one will be.
pub struct Kernel {
    /// It is unpacked here.
    dir: PathBuf,
    suite: String,
}

impl Kernel {
    /// The newest for the machine's own release.
    pub fn own(dir: &Path) -> Self {
        Self { dir: dir.join("kernel"), suite: format!("{}-backports", debian::suite()) }
    }

    /// The newest for the release after that.
    pub fn next(dir: &Path) -> Self {
        Self { dir: dir.join("kernel-next"), suite: NEXT_SUITE.to_owned() }
    }

    /// A file of the cache that belongs to this kernel.
    pub fn place(&self, extension: &str) -> PathBuf {
        self.dir.with_extension(extension)
    }

    /// Downloads and unpacks it. The configuration differs from the machine's in one thing: it knows
    /// the suite.
    pub fn download(&self) -> Result<()> {
        let apt = self.dir.with_extension("apt");
        fs::create_dir_all(apt.join("lists/partial"))?;
        fs::create_dir_all(apt.join("cache/archives/partial"))?;
        let (_, archive) = debian::sources();
        let keys = "/usr/share/keyrings/debian-archive-keyring.gpg";
        fs::write(
            apt.join("sources.list"),
            format!("deb [signed-by={keys}] {archive} {} main\n", self.suite),
        )?;
        let place = apt.display();
        fs::write(
            apt.join("apt.conf"),
            format!(
                "Dir::Etc::sourcelist \"{place}/sources.list\";\nDir::Etc::sourceparts \"-\";\n\
                 Dir::State::lists \"{place}/lists\";\nDir::Cache \"{place}/cache\";\n\
                 APT::Sandbox::User \"root\";\n"
            ),
        )?;
        let tool = |program: &str, arguments: &[&str]| {
            let mut command = Command::new(program);
            command.args(arguments).env("APT_CONFIG", apt.join("apt.conf")).current_dir(&apt);
            output_of(command)
        };
        tool("apt-get", &["update", "-qq"])?;
        let hard = "--recurse --no-recommends --no-suggests --no-conflicts --no-breaks \
                    --no-replaces --no-enhances";
        let mut words = vec!["depends"];
        words.extend(hard.split_ascii_whitespace());
        let depends = tool("apt-cache", &[&words[..], &[META]].concat())?;
        let packages = parts(&depends);
        ensure!(!packages.is_empty(), "{META} of {} depends on no kernel", self.suite);
        let names: Vec<&str> = packages.iter().map(String::as_str).collect();
        tool("apt-get", &[&["download", "-qq"], &names[..]].concat())?;
        let _ = fs::remove_dir_all(&self.dir); // ignored: it may be absent
        let files = fs::read_dir(&apt)?.flatten().map(|e| e.path());
        for deb in files.filter(|path| path.extension().is_some_and(|e| e == "deb")) {
            let mut unpack = Command::new("dpkg");
            unpack.arg("-x").arg(deb).arg(&self.dir);
            output_of(unpack)?;
        }
        fs::remove_dir_all(&apt)?;
        Ok(())
    }

    /// Its modules, a directory that is called by its version.
    pub fn modules(&self) -> Result<PathBuf> {
        let places = ["lib/modules", "usr/lib/modules"].map(|place| self.dir.join(place));
        let found = places.iter().find_map(|place| fs::read_dir(place).ok()?.flatten().next());
        Ok(found.with_context(|| format!("no modules in {}", self.dir.display()))?.path())
    }

    /// What `uname -r` says under it.
    pub fn version(&self) -> Result<String> {
        let name = self.modules()?.file_name().unwrap_or_default().to_owned();
        Ok(name.to_string_lossy().into_owned())
    }

    /// What QEMU boots.
    pub fn image(&self) -> Result<PathBuf> {
        let places = [
            self.dir.join("boot").join(format!("vmlinuz-{}", self.version()?)),
            self.modules()?.join("vmlinuz"),
        ];
        let found = places.into_iter().find(|path| path.is_file());
        found.with_context(|| format!("no vmlinuz in {}", self.dir.display()))
    }
}

/// The packages of one kernel, from all that the one depends on that stands for the newest.
fn parts(depends: &str) -> Vec<String> {
    let is_part = |line: &&str| {
        let rest = PARTS.iter().find_map(|part| line.strip_prefix(part));
        rest.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
    };
    depends.lines().filter(is_part).map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kernel_is_in_one_package_or_in_several() {
        let one = "linux-image-cloud-amd64\n  Depends: linux-image-6.12.9+deb12-cloud-amd64\n\
                   linux-image-6.12.9+deb12-cloud-amd64\n  Depends: kmod\nkmod\nlinux-base\n";
        assert_eq!(parts(one), ["linux-image-6.12.9+deb12-cloud-amd64"]);
        let several = "linux-image-cloud-amd64\nlinux-base-cloud-amd64\nlinux-image-7.3-a\n\
                       linux-base\nlinux-binary-7.3-a\n  Depends: linux-base-7.3-a\n\
                       linux-modules-7.3-a\nlinux-base-7.3-a\n<linux-initramfs-tool>\n";
        assert_eq!(parts(several).len(), 4);
    }
}
