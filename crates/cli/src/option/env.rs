//! Environment variables: `-e NAME=VALUE`, `-e NAME`, `-e 'PREFIX*'`, `--env-file`.

use super::Invalid;

/// An environment, in the order in which the names were first set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Environment(Vec<(String, String)>);

/// The environment of the caller, from which `-e NAME` copies.
pub(crate) type Host<'a> = &'a dyn Fn() -> Vec<(String, String)>;

impl Environment {
    /// Sets a variable; a later value replaces an earlier one in its place.
    pub(crate) fn set(&mut self, name: &str, value: &str) {
        match self.0.iter_mut().find(|(n, _)| n == name) {
            Some((_, v)) => value.clone_into(v),
            None => self.0.push((name.to_owned(), value.to_owned())),
        }
    }

    /// Adds one argument of `-e`: `NAME=VALUE` as it is; `NAME` with the caller's value, if the
    /// caller has one; `PREFIX*` with all matching variables of the caller.
    pub(crate) fn add(&mut self, text: &str, host: Host) -> Result<(), Invalid> {
        let bad = || Invalid::new("environment variable", text, "NAME=VALUE, NAME or PREFIX*");
        let name = text.split_once('=').map_or(text, |(name, _)| name);
        if name.is_empty() || text.contains('\0') {
            return Err(bad());
        }
        if let Some((name, value)) = text.split_once('=') {
            self.set(name, value);
        } else if let Some(prefix) = name.strip_suffix('*') {
            host().iter().filter(|(n, _)| n.starts_with(prefix)).for_each(|(n, v)| self.set(n, v));
        } else {
            host().iter().filter(|(n, _)| n == name).for_each(|(n, v)| self.set(n, v));
        }
        Ok(())
    }

    /// Adds the lines of an `--env-file`: as `-e`, without leading blanks; empty lines and lines
    /// that begin with `#` are ignored.
    pub(crate) fn add_file(&mut self, text: &str, host: Host) -> Result<(), Invalid> {
        for line in text.lines() {
            let line = line.trim_start();
            if line.is_empty() || line.starts_with('#') {
                continue;
            }
            let name = line.split('=').next().unwrap_or(line);
            if name.trim_end().contains(char::is_whitespace) {
                return Err(Invalid::new("environment variable", name, "a name without blanks"));
            }
            self.add(line, host)?;
        }
        Ok(())
    }

    /// Returns `NAME=value` for each variable.
    pub(crate) fn into_entries(self) -> Vec<String> {
        self.0.into_iter().map(|(n, v)| format!("{n}={v}")).collect()
    }
}

/// Returns the caller's environment, without values that are not UTF-8.
pub(crate) fn host() -> Vec<(String, String)> {
    let text = |(n, v): (std::ffi::OsString, std::ffi::OsString)| {
        Some((n.into_string().ok()?, v.into_string().ok()?))
    };
    std::env::vars_os().filter_map(text).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host() -> Vec<(String, String)> {
        let pair = |n: &str, v: &str| (n.to_owned(), v.to_owned());
        vec![pair("LANG", "C"), pair("LC_ALL", "x"), pair("LC_TIME", "y=z")]
    }

    fn after(args: &[&str]) -> Vec<String> {
        let mut env = Environment::default();
        env.set("PATH", "/bin");
        for arg in args {
            env.add(arg, &host).unwrap();
        }
        env.into_entries()
    }

    #[test]
    fn env_option_sets_values_names_and_prefixes() {
        assert_eq!(after(&["A=1", "PATH=/x", "A=2"]), ["PATH=/x", "A=2"]);
        assert_eq!(after(&["LANG", "NOT_THERE"]), ["PATH=/bin", "LANG=C"]);
        assert_eq!(after(&["LC_*"]), ["PATH=/bin", "LC_ALL=x", "LC_TIME=y=z"]);
        assert_eq!(after(&["E=", "B=a=b\n"]), ["PATH=/bin", "E=", "B=a=b\n"]);
        for bad in ["", "=", "=x", "A=\0"] {
            assert!(Environment::default().add(bad, &host).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn env_file_lines_are_read_as_options() {
        let mut env = Environment::default();
        env.add_file("# no\n\n  A=1 \nLANG\nB='x'\r\n", &host).unwrap();
        assert_eq!(env.into_entries(), ["A=1 ", "LANG=C", "B='x'"]);
        assert!(Environment::default().add_file("export A=1", &host).is_err());
        assert!(Environment::default().add_file("=1", &host).is_err());
    }
}
