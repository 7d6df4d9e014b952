//! The shape of a container: the kinds of its objects, and what they consist of.
//!
//! A shape is a set of *features*, such as `timer/clock=1` or `process/threads/time_limit`. Numbers
//! that only count or name something are not part of it, so that two checkpoints of one program at
//! work have the same features, or nearly. A later shape is proven if all its features are.

use std::collections::BTreeSet;

use dormouse_record::{Error, Records, Result};
use serde_json::Value;

/// Fields that are left out: contents, and state that every program changes all the time.
const LEFT_OUT: [&str; 12] = [
    "registers",
    "extended",
    "auxv",
    "layout",
    "runs",
    "vdso",
    "guards",
    "info",
    "content",
    "code",
    "data",
    "text",
];

/// Fields whose value is a choice: it is part of a feature.
const CHOICES: [&str; 14] = [
    "kind",
    "is",
    "from",
    "flags",
    "file_type",
    "access",
    "clock",
    "notify",
    "policy",
    "socket_type",
    "level",
    "seals",
    "which",
    "call",
];

/// The features of a container.
pub fn features(records: &Records) -> Result<BTreeSet<String>> {
    let mut all = BTreeSet::new();
    let value =
        |of: serde_json::Result<Value>| of.map_err(|e| Error::damaged("records", e.to_string()));
    for process in &records.processes {
        walk(&mut all, "process", "", &value(serde_json::to_value(process))?);
    }
    for memory in &records.memories {
        walk(&mut all, "memory", "", &value(serde_json::to_value(memory))?);
    }
    for object in &records.objects {
        let value = value(serde_json::to_value(object))?;
        let kind = value["kind"].as_str().unwrap_or_default();
        walk(&mut all, kind, "", &value);
    }
    Ok(all)
}

fn walk(all: &mut BTreeSet<String>, place: &str, field: &str, value: &Value) {
    match value {
        Value::Object(fields) => {
            for (name, value) in fields {
                if !LEFT_OUT.contains(&name.as_str()) {
                    walk(all, &format!("{place}/{name}"), name, value);
                }
            }
        }
        Value::Array(list) => list.iter().for_each(|value| walk(all, place, field, value)),
        Value::Null | Value::Bool(false) => {}
        _ if CHOICES.contains(&field) => drop(all.insert(format!("{place}={value}"))),
        Value::Number(number) if number.as_f64() == Some(0.0) => {}
        _ => drop(all.insert(place.to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use dormouse_record::{Event, Thing, sample};

    use super::*;

    fn with(count: u64, flags: u32) -> BTreeSet<String> {
        let mut records = sample::small();
        records.objects.push(Thing::Event(Event { count, semaphore: false, flags }).into());
        features(&records).unwrap()
    }

    #[test]
    fn counts_are_no_features_and_choices_are() {
        assert_eq!(with(4, 2), with(5, 2));
        assert_ne!(with(4, 2), with(0, 2), "a counter that was never used differs");
        assert!(!with(4, 2050).is_subset(&with(4, 2)));
        assert!(with(4, 2).contains("event/flags=2"), "{:?}", with(4, 2));
    }
}
