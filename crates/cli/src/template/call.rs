//! Functions of templates: Go's own, and those that podman and docker add.
//!
//! Uses `value`, and `output` for JSON without terminal controls.

use std::cmp::Ordering;

use super::value::{Invalid, Value, field};
use crate::output;

/// The names of all functions.
pub(super) const FUNCTIONS: &[&str] = &[
    "and", "eq", "ge", "gt", "index", "join", "json", "le", "len", "lower", "lt", "ne", "not",
    "or", "print", "printf", "println", "slice", "split", "title", "truncate", "upper",
];

/// LIMIT: the widest field that `printf` fills.
const WIDTH_MAX: usize = 1000;

/// Calls a function.
pub(super) fn call(name: &str, arguments: &[Value]) -> Result<Value, Invalid> {
    let made = |text: String| Ok(Value::Made(text));
    match (name, arguments) {
        // The first value that decides, as in Go; all arguments were computed before.
        ("and", [first, rest @ ..]) => Ok(choose(first, rest, |value| !value.is_true())),
        ("or", [first, rest @ ..]) => Ok(choose(first, rest, Value::is_true)),
        ("not", [value]) => Ok(Value::Bool(!value.is_true())),
        ("eq", [first, rest @ ..]) if !rest.is_empty() => {
            let mut is_equal = false;
            for other in rest {
                is_equal |= equal(first, other)?;
            }
            Ok(Value::Bool(is_equal))
        }
        ("ne", [a, b]) => Ok(Value::Bool(!equal(a, b)?)),
        ("lt", [a, b]) => Ok(Value::Bool(order(name, a, b)? == Ordering::Less)),
        ("le", [a, b]) => Ok(Value::Bool(order(name, a, b)? != Ordering::Greater)),
        ("gt", [a, b]) => Ok(Value::Bool(order(name, a, b)? == Ordering::Greater)),
        ("ge", [a, b]) => Ok(Value::Bool(order(name, a, b)? != Ordering::Less)),
        ("len", [value]) => match value {
            Value::List(list) => Ok(Value::Int(list.len() as i64)),
            Value::Map(map) => Ok(Value::Int(map.len() as i64)),
            Value::Text(text) | Value::Made(text) => Ok(Value::Int(text.len() as i64)),
            other => Err(Invalid::new(format!("'len' of {}", other.kind()))),
        },
        ("index", [value, keys @ ..]) => {
            let mut value = value;
            for key in keys {
                value = index(value, key)?;
            }
            Ok(value.clone())
        }
        ("slice", [Value::Text(text) | Value::Made(text), bounds @ ..]) if bounds.len() <= 2 => {
            let bound = |n: usize, default: usize| match bounds.get(n) {
                None => Ok(default),
                Some(Value::Int(at)) => usize::try_from(*at).map_err(|_| out_of(*at)),
                Some(other) => Err(Invalid::new(format!("'slice' at {}", other.kind()))),
            };
            let (from, to) = (bound(0, 0)?, bound(1, text.len())?);
            let part = text.get(from..to).ok_or_else(|| out_of(to as i64))?;
            Ok(Value::Text(part.to_owned()))
        }
        ("json", [value]) => made(output::json_text(value)),
        ("join", [Value::List(list), separator]) => {
            let texts: Vec<String> = list.iter().map(Value::shown).collect();
            made(texts.join(&separator.shown()))
        }
        ("split", [Value::Text(text) | Value::Made(text), by]) => {
            let by = by.shown();
            let parts = text.split(by.as_str()).filter(|part| !by.is_empty() || !part.is_empty());
            Ok(Value::List(parts.map(|part| Value::Text(part.to_owned())).collect()))
        }
        ("lower", [value]) => made(value.shown().to_lowercase()),
        ("upper", [value]) => made(value.shown().to_uppercase()),
        ("title", [value]) => {
            let mut begins = true;
            let title = |c: char| {
                let now = std::mem::replace(&mut begins, !c.is_alphanumeric());
                if now { c.to_uppercase().collect() } else { String::from(c) }
            };
            made(value.shown().chars().map(title).collect())
        }
        ("truncate", [value, Value::Int(length)]) => {
            let length = usize::try_from(*length).map_err(|_| out_of(*length))?;
            made(value.shown().chars().take(length).collect())
        }
        ("print" | "println", values) => {
            let mut text = String::new();
            for (n, value) in values.iter().enumerate() {
                // Go separates two values by a space if neither is a text, and all of println.
                let is_text = |v: &Value| matches!(v, Value::Text(_) | Value::Made(_));
                let before = n.checked_sub(1).and_then(|n| values.get(n));
                let both = |before: &Value| !is_text(before) && !is_text(value);
                if before.is_some_and(|before| name == "println" || both(before)) {
                    text.push(' ');
                }
                text.push_str(&value.shown());
            }
            if name == "println" {
                text.push('\n');
            }
            made(text)
        }
        ("printf", [Value::Text(format) | Value::Made(format), values @ ..]) => {
            made(printf(format, values)?)
        }
        _ if FUNCTIONS.contains(&name) => {
            let kinds: Vec<&str> = arguments.iter().map(Value::kind).collect();
            let text = match kinds.is_empty() {
                true => format!("'{name}' has no arguments"),
                false => format!("'{name}' does not take {}", kinds.join(" and ")),
            };
            Err(Invalid::new(text))
        }
        _ => {
            let all = FUNCTIONS.join(", ");
            Err(Invalid::new(format!("no function is called '{name}'; there are {all}")))
        }
    }
}

fn choose(first: &Value, rest: &[Value], decides: impl Fn(&Value) -> bool) -> Value {
    let mut all = std::iter::once(first).chain(rest);
    let decisive = all.find(|value| decides(value));
    decisive.or(rest.last()).unwrap_or(first).clone()
}

fn equal(a: &Value, b: &Value) -> Result<bool, Invalid> {
    match (a, b) {
        (Value::None, Value::None) => Ok(true),
        (Value::None, _) | (_, Value::None) => Ok(false),
        _ => Ok(order("eq", a, b)? == Ordering::Equal),
    }
}

fn order(name: &str, a: &Value, b: &Value) -> Result<Ordering, Invalid> {
    let differ = || format!("'{name}' cannot compare {} and {}", a.kind(), b.kind());
    a.compare(b).ok_or_else(|| Invalid::new(differ()))
}

fn out_of(at: i64) -> Invalid {
    Invalid::new(format!("index {at} is out of range"))
}

fn index<'v>(value: &'v Value, key: &Value) -> Result<&'v Value, Invalid> {
    match (value, key) {
        (Value::List(list), Value::Int(at)) => {
            let found = usize::try_from(*at).ok().and_then(|n| list.get(n));
            found.ok_or_else(|| out_of(*at))
        }
        (value @ Value::Map(_), Value::Text(key) | Value::Made(key)) => field(value, key),
        (value, key) => Err(Invalid::new(format!("'index' of {} by {}", value.kind(), key.kind()))),
    }
}

/// Go's `Printf` with the verbs v, s, q, d, x, X, t and f, the flags `-` and `0`, width and precision.
fn printf(format: &str, values: &[Value]) -> Result<String, Invalid> {
    let mut out = String::new();
    let mut values = values.iter();
    let mut chars = format.chars().peekable();
    while let Some(c) = chars.next() {
        if c != '%' {
            out.push(c);
            continue;
        }
        let (mut left, mut zero) = (false, false);
        while let Some(flag) = chars.next_if(|c| matches!(c, '-' | '0' | '+' | ' ' | '#')) {
            left |= flag == '-';
            zero |= flag == '0';
        }
        let number = |chars: &mut std::iter::Peekable<std::str::Chars<'_>>| {
            let mut n = None;
            while let Some(digit) = chars.next_if(char::is_ascii_digit) {
                let digit = digit.to_digit(10).unwrap_or(0) as usize;
                n = Some((n.unwrap_or(0) * 10 + digit).min(WIDTH_MAX));
            }
            n
        };
        let width = number(&mut chars).unwrap_or(0);
        let precision = chars.next_if_eq(&'.').map(|_| number(&mut chars).unwrap_or(0));
        let verb = chars.next();
        if verb == Some('%') {
            out.push('%');
            continue;
        }
        let value = values.next();
        let text = match (verb, value) {
            (Some(verb), None) => {
                return Err(Invalid::new(format!("'printf' has no value for %{verb}")));
            }
            (Some('v' | 's'), Some(value)) => match precision {
                Some(most) => value.shown().chars().take(most).collect(),
                None => value.shown(),
            },
            (Some('q'), Some(value)) => format!("\"{}\"", value.shown().replace('"', "\\\"")),
            (Some('d'), Some(Value::Int(n))) => n.to_string(),
            (Some('x'), Some(Value::Int(n))) => format!("{n:x}"),
            (Some('X'), Some(Value::Int(n))) => format!("{n:X}"),
            (Some('t'), Some(Value::Bool(b))) => b.to_string(),
            (Some('f'), Some(Value::Float(n))) => format!("{n:.*}", precision.unwrap_or(6)),
            (Some('f'), Some(Value::Int(n))) => {
                format!("{:.*}", precision.unwrap_or(6), *n as f64)
            }
            (Some(verb), Some(value)) => {
                return Err(Invalid::new(format!(
                    "'printf' cannot print {} by %{verb}",
                    value.kind()
                )));
            }
            (None, _) => return Err(Invalid::new("the format of 'printf' ends in %")),
        };
        let missing = width.saturating_sub(text.chars().count());
        let fill = if zero && !left { "0" } else { " " };
        match left {
            true => out.extend([text.as_str(), &fill.repeat(missing)]),
            false => out.extend([fill.repeat(missing).as_str(), &text]),
        }
    }
    match values.next() {
        None => Ok(out),
        Some(_) => Err(Invalid::new("'printf' has more values than its format names")),
    }
}
