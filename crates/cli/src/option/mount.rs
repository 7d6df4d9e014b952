//! Mounts: `-v`, `--mount`, `--tmpfs`, and the volumes an image declares.

use std::path::{Component, Path, PathBuf};

use dormouse_model::{Mount, MountKind, Name, Propagation, parse_bytes};

use super::{Invalid, flag};

/// A requested mount. An anonymous volume gets its name together with the container's.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Asked {
    /// Complete.
    Mount(Mount),
    /// An anonymous volume at this path, which is removed with the container.
    Anonymous(Mount),
}

const TARGET: &str = "an absolute path below / without '..'";

/// Checks a path inside: absolute, without `..`, not the root itself.
fn target(text: &str) -> Result<String, Invalid> {
    let bad = || Invalid::new("path in the container", text, TARGET);
    let path = Path::new(text);
    let mut clean = String::new();
    if !path.is_absolute() || text.contains(['\0', '\n']) || text.len() > 4095 {
        return Err(bad());
    }
    for part in path.components() {
        match part {
            Component::RootDir => {}
            Component::Normal(name) => {
                clean.push('/');
                clean.push_str(name.to_str().ok_or_else(bad)?);
            }
            _ => return Err(bad()),
        }
    }
    if clean.is_empty() { Err(bad()) } else { Ok(clean) }
}

/// Options of all kinds of mounts.
#[derive(Debug, Default)]
struct Options {
    read_only: bool,
    no_exec: Option<bool>,
    not_recursive: bool,
    no_idmap: bool,
    no_copy: bool,
    propagation: Option<Propagation>,
    size_bytes: Option<u64>,
    mode: Option<u32>,
}

impl Options {
    /// Reads the options of the operator's configuration.
    fn begin(defaults: &str) -> Result<Self, Invalid> {
        let mut options = Self::default();
        for word in defaults.split(',') {
            if !options.take(word)? {
                let expected = "options such as noidmap, noexec, ro ([run] in config.toml)";
                return Err(Invalid::new("default-volume", defaults, expected));
            }
        }
        Ok(options)
    }

    /// Reads one option of `-v` or `--tmpfs`; returns false if the word is none.
    fn take(&mut self, option: &str) -> Result<bool, Invalid> {
        match option {
            "ro" | "readonly" => self.read_only = true,
            "rw" => self.read_only = false,
            "exec" => self.no_exec = Some(false),
            "noexec" => self.no_exec = Some(true),
            "bind" => self.not_recursive = true,
            "rbind" => self.not_recursive = false,
            "idmap" => self.no_idmap = false,
            "noidmap" => self.no_idmap = true,
            "copy" => self.no_copy = false,
            "nocopy" => self.no_copy = true,
            // Ignored, since they hold anyway: cgroup and user namespace refuse devices,
            // set-user-id has no effect beyond the namespace, and no label-based security module is
            // used.
            "nodev" | "nosuid" | "z" | "Z" | "" => {}
            other => match other.strip_prefix("size=") {
                Some(size) => self.size_bytes = Some(parse_bytes(size)?),
                None => match other.strip_prefix("mode=") {
                    Some(mode) => self.mode = Some(mode_bits(mode)?),
                    None => match propagation(other) {
                        Some(p) => self.propagation = Some(p),
                        None => return Ok(false),
                    },
                },
            },
        }
        Ok(true)
    }

    fn bind(self, source: PathBuf, target: String) -> Mount {
        Mount {
            target,
            kind: MountKind::Bind {
                source,
                recursive: !self.not_recursive,
                idmap: !self.no_idmap,
                propagation: self.propagation.unwrap_or_default(),
            },
            read_only: self.read_only,
            no_exec: self.no_exec.unwrap_or(false),
        }
    }

    fn volume(self, name: Option<&str>, target: String) -> Result<Asked, Invalid> {
        let mount = |name| Mount {
            target,
            kind: MountKind::Volume { name, no_copy: self.no_copy },
            read_only: self.read_only,
            no_exec: self.no_exec.unwrap_or(false),
        };
        match name {
            Some(name) => Ok(Asked::Mount(mount(name.parse()?))),
            None => Ok(Asked::Anonymous(mount("anonymous".parse::<Name>()?))),
        }
    }

    /// A tmpfs is not executable by default, as in podman.
    fn tmpfs(self, target: String) -> Mount {
        let mode = self.mode.unwrap_or(0o1777);
        Mount {
            target,
            kind: MountKind::Tmpfs { size_bytes: self.size_bytes, mode },
            read_only: self.read_only,
            no_exec: self.no_exec.unwrap_or(true),
        }
    }
}

fn propagation(text: &str) -> Option<Propagation> {
    match text {
        "private" | "rprivate" => Some(Propagation::Private),
        "slave" | "rslave" => Some(Propagation::Slave),
        "shared" | "rshared" => Some(Propagation::Shared),
        _ => None,
    }
}

fn mode_bits(text: &str) -> Result<u32, Invalid> {
    let mode = u32::from_str_radix(text, 8).ok().filter(|m| *m <= 0o7777);
    mode.ok_or_else(|| Invalid::new("mode", text, "an octal number up to 7777"))
}

/// Returns the source of a bind mount: absolute, or relative to `cwd`.
fn bind_source(text: &str, cwd: &Path) -> Result<PathBuf, Invalid> {
    if text.is_empty() || text.contains('\0') {
        return Err(Invalid::new("path on the host", text, "a path"));
    }
    Ok(cwd.join(text)) // an absolute path replaces cwd
}

/// Reads `-v [SOURCE:]TARGET[:OPTIONS]`. A source that begins with a slash or a dot is a path of
/// the host, any other the name of a volume; without a source the volume is anonymous.
///
/// The options `defaults` come before those of a path of the host.
pub(crate) fn volume(text: &str, cwd: &Path, defaults: &str) -> Result<Asked, Invalid> {
    let expected = "[SOURCE:]TARGET[:OPTIONS] with options such as ro, noexec, noidmap, nocopy";
    let bad = || Invalid::new("volume", text, expected);
    let parts: Vec<&str> = text.split(':').collect();
    let (source, inside, words) = match parts[..] {
        [inside] => (None, inside, ""),
        [inside, words @ ("ro" | "rw" | "exec" | "noexec")] if inside.starts_with('/') => {
            (None, inside, words)
        }
        [source, inside] => (Some(source), inside, ""),
        [source, inside, words] => (Some(source), inside, words),
        _ => return Err(bad()),
    };
    let is_bind = source.is_some_and(|path| path.starts_with(['/', '.']));
    if let Some(path) = source.filter(|path| !is_bind && path.contains('/')) {
        // A name has no slash, so a path was meant.
        let expected = "a name, or a path of the host that begins with / or ./";
        return Err(Invalid::new("source of a volume", path, expected));
    }
    let mut options = if is_bind { Options::begin(defaults)? } else { Options::default() };
    for word in words.split(',') {
        if !options.take(word)? {
            return Err(bad());
        }
    }
    let inside = target(inside)?;
    match source {
        Some(path) if is_bind => Ok(Asked::Mount(options.bind(bind_source(path, cwd)?, inside))),
        Some("") => Err(bad()),
        name => options.volume(name, inside),
    }
}

/// Reads `--tmpfs TARGET[:OPTIONS]`.
pub(crate) fn tmpfs(text: &str) -> Result<Mount, Invalid> {
    let (inside, words) = text.split_once(':').unwrap_or((text, ""));
    let mut options = Options::default();
    for word in words.split(',') {
        if !options.take(word)? {
            return Err(Invalid::new("tmpfs option", word, "size=, mode=, ro, rw, exec or noexec"));
        }
    }
    Ok(options.tmpfs(target(inside)?))
}

/// Reads `--shm-size SIZE`.
pub(crate) fn shm(text: &str) -> Result<Mount, Invalid> {
    let options = Options { size_bytes: Some(parse_bytes(text)?), ..Options::default() };
    Ok(options.tmpfs("/dev/shm".into()))
}

/// Reads `--mount type=TYPE,KEY=VALUE,...`. The options `defaults` come before those of a bind.
pub(crate) fn mount(text: &str, cwd: &Path, defaults: &str) -> Result<Asked, Invalid> {
    let bad = |expected| Invalid::new("mount", text, expected);
    let keys = "type=bind|volume|tmpfs|devpts with source=, target=, readonly, noexec, idmap=, \
                bind-propagation=, volume-nocopy, tmpfs-size=, tmpfs-mode=";
    let is_bind = text.split(',').any(|pair| pair == "type=bind");
    let mut options = if is_bind { Options::begin(defaults)? } else { Options::default() };
    let (mut kind, mut source, mut inside) = ("volume", None, None);
    for pair in text.split(',') {
        let (key, value) = match pair.split_once('=') {
            Some((key, value)) => (key, Some(value)),
            None => (pair, None),
        };
        match (key, value) {
            ("type", Some(value)) => kind = value,
            ("source" | "src", Some(value)) => source = Some(value),
            ("target" | "dst" | "destination", Some(value)) => inside = Some(target(value)?),
            ("ro" | "readonly", value) => options.read_only = flag("readonly", value)?,
            ("rw", value) => options.read_only = !flag("rw", value)?,
            ("noexec", value) => options.no_exec = Some(flag("noexec", value)?),
            ("exec", value) => options.no_exec = Some(!flag("exec", value)?),
            ("idmap", value) => options.no_idmap = !flag("idmap", value)?,
            ("bind-nonrecursive", value) => {
                options.not_recursive = flag("bind-nonrecursive", value)?;
            }
            ("bind-propagation", Some(value)) => {
                options.propagation = Some(propagation(value).ok_or_else(|| bad(keys))?);
            }
            ("tmpfs-size", Some(value)) => options.size_bytes = Some(parse_bytes(value)?),
            ("tmpfs-mode", Some(value)) => options.mode = Some(mode_bits(value)?),
            ("volume-nocopy", value) => options.no_copy = flag("volume-nocopy", value)?,
            ("nodev" | "nosuid", None) => {}
            _ => return Err(bad(keys)),
        }
    }
    let inside = match (kind, inside) {
        (_, Some(inside)) => inside,
        ("devpts", None) => "/dev/pts".to_owned(),
        _ => return Err(bad("with a target=")),
    };
    match kind {
        "bind" => {
            let source = source.ok_or_else(|| bad("a bind with a source="))?;
            Ok(Asked::Mount(options.bind(bind_source(source, cwd)?, inside)))
        }
        "volume" => options.volume(source.filter(|s| !s.is_empty()), inside),
        "tmpfs" if source.is_none() => Ok(Asked::Mount(options.tmpfs(inside))),
        "devpts" if source.is_none() => Ok(Asked::Mount(Mount {
            target: inside,
            kind: MountKind::Devpts,
            read_only: false,
            no_exec: true,
        })),
        _ => Err(bad(keys)),
    }
}

/// Makes the volume that an image declares at a path.
pub(crate) fn image_volume(path: &str) -> Result<Asked, Invalid> {
    Options::default().volume(None, target(path)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bind(text: &str) -> (String, String, bool, bool) {
        match volume(text, Path::new("/cwd"), "").unwrap() {
            Asked::Mount(Mount {
                target,
                read_only,
                kind: MountKind::Bind { source, idmap, .. },
                ..
            }) => (source.display().to_string(), target, read_only, idmap),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn volume_option_is_parsed_or_refused() {
        let s = str::to_owned;
        assert_eq!(bind("/a:/b"), (s("/a"), s("/b"), false, true));
        assert_eq!(bind("/a:/b/:ro,z"), (s("/a"), s("/b"), true, true));
        assert_eq!(bind("./x:/b//c:noidmap"), (s("/cwd/./x"), s("/b/c"), false, false));
        assert!(matches!(volume("/data", Path::new("/"), ""), Ok(Asked::Anonymous(_))));
        assert!(matches!(
            volume("/data:ro", Path::new("/"), ""),
            Ok(Asked::Anonymous(Mount { read_only: true, .. }))
        ));
        assert!(matches!(
            volume("db:/data", Path::new("/"), ""),
            Ok(Asked::Mount(Mount { kind: MountKind::Volume { .. }, .. }))
        ));
        for bad in [
            "",
            ":",
            "a",
            "a:b",
            ":/b",
            "/a:",
            "/a:/",
            "/a:/../b",
            "/a:/b/..",
            "/a:/b:bogus",
            "/a:/b:ro:ro",
            "a/b:/c",
            "/a:/b\n",
            "..:b",
            "/a:/b:size=x",
            "-x:/b",
        ] {
            assert!(volume(bad, Path::new("/"), "").is_err(), "{bad:?}");
        }
    }

    #[test]
    fn mount_option_is_parsed_or_refused() {
        let of = |t: &str| mount(t, Path::new("/cwd"), "");
        let b = of("type=bind,src=/a,dst=/b,ro").unwrap();
        assert_eq!(b, volume("/a:/b:ro", Path::new("/"), "").unwrap());
        let b = of("type=bind,source=/a,target=/b,readonly=false,bind-propagation=rslave").unwrap();
        assert_eq!(b, volume("/a:/b:rslave", Path::new("/"), "").unwrap());
        let t = of("type=tmpfs,target=/t,tmpfs-size=1m,tmpfs-mode=700").unwrap();
        assert_eq!(t, Asked::Mount(tmpfs("/t:size=1m,mode=700").unwrap()));
        assert!(matches!(
            of("type=devpts"),
            Ok(Asked::Mount(Mount { kind: MountKind::Devpts, .. }))
        ));
        assert!(matches!(of("target=/v"), Ok(Asked::Anonymous(_))));
        let n = of("source=db,target=/v,volume-nocopy").unwrap();
        assert_eq!(n, volume("db:/v:nocopy", Path::new("/"), "").unwrap());
        assert_ne!(n, volume("db:/v", Path::new("/"), "").unwrap());
        for bad in [
            "",
            "type=bind",
            "type=bind,dst=/b",
            "type=bind,src=,dst=/b",
            "type=nfs,dst=/b",
            "type=tmpfs,src=/a,dst=/b",
            "type=bind,src=/a,dst=b",
            "bogus",
            "type=bind,src=/a,dst=/",
            "type=tmpfs,dst=/t,tmpfs-mode=9",
            "type=bind,src=/a,dst=/b,ro=maybe",
        ] {
            assert!(of(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn tmpfs_is_noexec_unless_exec_is_given() {
        assert!(tmpfs("/t").unwrap().no_exec);
        assert!(!tmpfs("/t:exec").unwrap().no_exec);
        assert!(tmpfs("/t:bogus").is_err());
        assert!(tmpfs("t").is_err());
    }

    proptest::proptest! {
        #[test]
        fn mount_target_never_leaves_root(text in "[a-z/.:,=]{0,40}|.*") {
            for asked in [volume(&text, Path::new("/"), ""), mount(&text, Path::new("/"), "")] {
                if let Ok(Asked::Mount(m) | Asked::Anonymous(m)) = asked {
                    proptest::prop_assert!(m.target.starts_with('/') && m.target.len() > 1);
                    proptest::prop_assert!(!m.target.split('/').any(|p| p == ".."));
                }
            }
            let _ = tmpfs(&text);
        }
    }

    #[test]
    fn binds_begin_with_the_options_of_the_configuration() {
        let read = |text: &str, defaults: &str| volume(text, Path::new("/"), defaults);
        let same = |a: &str, b: &str| assert_eq!(read(a, "noidmap,noexec"), read(b, ""), "{a}");
        same("/a:/b", "/a:/b:noidmap,noexec");
        same("/a:/b:idmap,exec,ro", "/a:/b:ro");
        same("name:/b", "name:/b");
        let spelled = |text: &str| mount(text, Path::new("/"), "noidmap");
        assert_eq!(spelled("type=bind,source=/a,target=/b"), read("/a:/b:noidmap", ""));
        assert_eq!(spelled("type=bind,source=/a,target=/b,idmap=true"), read("/a:/b", ""));
        assert!(read("/a:/b", "no-such-option").is_err());
        assert!(read("name:/b", "no-such-option").is_ok());
    }
}
