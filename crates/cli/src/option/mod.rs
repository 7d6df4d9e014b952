//! Parsers for the values of command line options, which produce the types of `model`.
//!
//! Every parser is total and does no I/O. Hostile text is an [`Invalid`] with the expected form,
//! never a panic, so each parser can be tested with a table and fuzzed with random text. Names and
//! meanings are podman's for every option that podman has.

pub(crate) mod env;
pub(crate) mod keys;
pub(crate) mod limit;
pub(crate) mod mount;
pub(crate) mod process;
pub(crate) mod security;
pub(crate) mod signal;
pub(crate) mod sleep;
pub(crate) mod stop;
pub(crate) mod time;

pub(crate) use dormouse_model::Invalid;

/// Splits `KEY=VALUE`; the value is empty without `=`.
pub(crate) fn key_value(text: &str) -> (&str, &str) {
    text.split_once('=').unwrap_or((text, ""))
}

/// Reads a flag with an optional value, as `readonly` or `readonly=true`.
pub(crate) fn flag(what: &'static str, value: Option<&str>) -> Result<bool, Invalid> {
    match value {
        None | Some("" | "true" | "1") => Ok(true),
        Some("false" | "0") => Ok(false),
        Some(other) => Err(Invalid::new(what, other, "true or false")),
    }
}

/// Reads a label: `KEY` or `KEY=VALUE` with a non-empty key.
pub(crate) fn label(text: &str) -> Result<(String, String), Invalid> {
    let (key, value) = key_value(text);
    if key.is_empty() || text.contains('\0') {
        return Err(Invalid::new("label", text, "KEY=VALUE"));
    }
    Ok((key.to_owned(), value.to_owned()))
}

/// Reads a line for `/etc/hosts`: `NAME:ADDRESS`.
pub(crate) fn extra_host(text: &str) -> Result<(String, std::net::IpAddr), Invalid> {
    let bad = || Invalid::new("host", text, "NAME:ADDRESS");
    let (name, address) = text.split_once(':').ok_or_else(bad)?;
    let address = address.strip_prefix('[').and_then(|a| a.strip_suffix(']')).unwrap_or(address);
    Ok((hostname(name).map_err(|_| bad())?, address.parse().map_err(|_| bad())?))
}

/// Checks a host name: labels of letters, digits, `-` and `_` joined by dots, 64 bytes at most
/// (sethostname(2)).
pub(crate) fn hostname(text: &str) -> Result<String, Invalid> {
    let part = |p: &str| {
        let ok = |b: u8| b.is_ascii_alphanumeric() || b == b'-' || b == b'_';
        !p.is_empty() && p.bytes().all(ok) && !p.starts_with('-') && !p.ends_with('-')
    };
    if text.len() <= 64 && text.split('.').all(part) {
        Ok(text.to_owned())
    } else {
        let expected = "letters, digits, '-' and '.', 64 bytes at most";
        Err(Invalid::new("host name", text, expected))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn host_name_is_checked() {
        for good in ["a", "web-1.example.org", "0", "x_y", &"a".repeat(64)] {
            assert!(hostname(good).is_ok(), "{good}");
        }
        for bad in ["", ".", "a..b", "-a", "a-", "a b", "a\n", "ä", "a/b", &"a".repeat(65)] {
            assert!(hostname(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn extra_host_is_name_and_address() {
        assert_eq!(extra_host("db:10.0.0.1").unwrap().0, "db");
        assert_eq!(extra_host("db:::1").unwrap().1.to_string(), "::1");
        assert_eq!(extra_host("db:[fd00::1]").unwrap().1.to_string(), "fd00::1");
        for bad in ["", "db", "db:", ":10.0.0.1", "db:x", "a\n:10.0.0.1", "a b:10.0.0.1"] {
            assert!(extra_host(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn label_is_split_at_first_equals_sign() {
        assert_eq!(label("a=b=c").unwrap(), ("a".into(), "b=c".into()));
        assert_eq!(label("a").unwrap(), ("a".into(), String::new()));
        assert!(label("=x").is_err());
    }
}
