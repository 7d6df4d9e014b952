//! Signals by name or number (signal(7)).

use super::Invalid;

/// Linux's names for x86-64 and arm64, by number.
const NAMES: [&str; 32] = [
    "", "HUP", "INT", "QUIT", "ILL", "TRAP", "ABRT", "BUS", "FPE", "KILL", "USR1", "SEGV", "USR2",
    "PIPE", "ALRM", "TERM", "STKFLT", "CHLD", "CONT", "STOP", "TSTP", "TTIN", "TTOU", "URG",
    "XCPU", "XFSZ", "VTALRM", "PROF", "WINCH", "IO", "PWR", "SYS",
];

/// The first real-time signal for programs, and the last.
const RT: (i32, i32) = (34, 64);

/// Reads `TERM`, `SIGTERM`, `term`, `15`, `RTMIN`, `RTMIN+3`, `RTMAX-1`.
pub(crate) fn signal(text: &str) -> Result<i32, Invalid> {
    let bad = || Invalid::new("signal", text, "a name such as TERM or a number from 1 to 64");
    if let Ok(number) = text.parse::<i32>() {
        return if (1..=RT.1).contains(&number) { Ok(number) } else { Err(bad()) };
    }
    let upper = text.to_ascii_uppercase();
    let name = upper.strip_prefix("SIG").unwrap_or(&upper);
    if let Some(number) = NAMES.iter().position(|n| *n == name && !n.is_empty()) {
        return Ok(number as i32);
    }
    let offset = |s: &str, sign: char| match s.strip_prefix(sign) {
        Some(digits) => digits.parse::<u8>().map(i32::from).map_err(|_| bad()),
        None if s.is_empty() => Ok(0),
        None => Err(bad()),
    };
    let number = match (name.strip_prefix("RTMIN"), name.strip_prefix("RTMAX")) {
        (Some(rest), _) => RT.0 + offset(rest, '+')?,
        (_, Some(rest)) => RT.1 - offset(rest, '-')?,
        _ => return Err(bad()),
    };
    if (RT.0..=RT.1).contains(&number) { Ok(number) } else { Err(bad()) }
}

/// Returns `SIGTERM` for 15, and `SIGRTMIN+3` for 37.
pub(crate) fn name(number: i32) -> String {
    let known = usize::try_from(number).ok().and_then(|n| NAMES.get(n)).filter(|n| !n.is_empty());
    match known {
        Some(name) => format!("SIG{name}"),
        None if number >= RT.0 => format!("SIGRTMIN+{}", number - RT.0),
        None => number.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signal_is_read_by_name_or_number() {
        for (text, number) in [
            ("TERM", 15),
            ("SIGKILL", 9),
            ("hup", 1),
            ("9", 9),
            ("64", 64),
            ("RTMIN+3", 37),
            ("SIGRTMAX-1", 63),
            ("RTMIN", 34),
            ("SIGSYS", 31),
        ] {
            assert_eq!(signal(text), Ok(number), "{text}");
            assert_eq!(signal(&name(number)), Ok(number), "{text}");
        }
        for bad in ["", "0", "65", "-9", "SIG", "BOGUS", "RTMIN+31", "RTMIN-1", "RTMAX+1", "9 "] {
            assert!(signal(bad).is_err(), "{bad:?}");
        }
    }

    proptest::proptest! {
        #[test]
        fn parsed_signal_is_in_range(text in "[a-zA-Z0-9+-]{0,10}|.*") {
            if let Ok(n) = signal(&text) {
                proptest::prop_assert!((1..=64).contains(&n));
            }
        }
    }
}
