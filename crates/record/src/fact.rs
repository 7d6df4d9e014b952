//! Facts about the state of a container, and the differences between two sets of them.
//!
//! A fact is a place, such as `process/1/status/SigBlk`, and a value, both as text. Two readers make
//! facts: crate `checkpoint` of records, and the tests of procfs. A comparison knows no kind of object:
//! two sets are equal, or differ at named places. The differences that a restore may make are rows of a
//! table ([`Expected`]), each with its reason.
//!
//! This module uses no other of the crate.

use std::collections::BTreeMap;
use std::fmt;

/// Facts by their places.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Facts(BTreeMap<String, String>);

/// A place with two values; `None` is a fact that one side does not have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Difference {
    /// The place.
    pub place: String,
    /// The value before.
    pub before: Option<String>,
    /// The value after.
    pub after: Option<String>,
}

/// A difference that is no fault.
#[derive(Debug, Clone, Copy)]
pub struct Expected {
    /// A place, in which `*` is any one segment and a final `**` any number of segments.
    pub place: &'static str,
    /// The permitted change.
    pub rule: Rule,
    /// The reason.
    pub reason: &'static str,
}

/// A permitted change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rule {
    /// Any.
    Any,
    /// A number that becomes smaller by at most so much: time passes.
    Falls(i128),
    /// A number that becomes larger: time passes.
    Rises,
    /// A number that becomes larger or smaller by at most so much.
    Near(i128),
    /// A value that begins with this text.
    To(&'static str),
    /// One value that becomes another.
    Turns {
        /// The value before.
        from: &'static str,
        /// The value after.
        to: &'static str,
    },
    /// A text without one of its words, where another word is absent.
    Loses {
        /// The word.
        word: &'static str,
        /// The word that is absent before.
        without: &'static str,
    },
    /// A set of bits that gains some, if it has none but certain ones before.
    Gains {
        /// The bits that it gains.
        bits: i128,
        /// The bits that it may have.
        beside: i128,
    },
    /// The fact is absent afterwards.
    Ends,
    /// The fact is absent before.
    Begins,
}

impl Rule {
    /// Its name in the documentation.
    pub fn name(self) -> &'static str {
        match self {
            Self::Any => "any",
            Self::Falls(_) => "smaller",
            Self::Rises => "larger",
            Self::Near(_) => "a little",
            Self::To(_) => "one value",
            Self::Turns { .. } => "one value for another",
            Self::Loses { .. } => "without a word",
            Self::Gains { .. } => "more bits",
            Self::Ends => "absent afterwards",
            Self::Begins => "absent before",
        }
    }

    fn permits(self, difference: &Difference) -> bool {
        let number = |text: &Option<String>| text.as_ref()?.parse::<i128>().ok();
        let numbers = number(&difference.before).zip(number(&difference.after));
        match self {
            Self::Any => true,
            Self::Falls(most) => {
                numbers.is_some_and(|(before, after)| after < before && before - after <= most)
            }
            Self::Rises => numbers.is_some_and(|(before, after)| after > before),
            Self::Near(most) => {
                numbers.is_some_and(|(before, after)| (after - before).abs() <= most)
            }
            Self::To(value) => {
                difference.after.as_ref().is_some_and(|after| after.starts_with(value))
            }
            Self::Turns { from, to } => {
                difference.before.as_deref() == Some(from)
                    && difference.after.as_deref() == Some(to)
            }
            Self::Loses { word, without } => {
                let words = |text: &Option<String>| -> Vec<String> {
                    let text = text.as_deref().unwrap_or_default();
                    text.split_ascii_whitespace().map(str::to_owned).collect()
                };
                let (mut before, after) = (words(&difference.before), words(&difference.after));
                let is_permitted = !before.iter().any(|one| one == without);
                before.retain(|one| one != word);
                is_permitted && before == after
            }
            Self::Gains { bits, beside } => numbers
                .is_some_and(|(before, after)| before & !beside == 0 && after == before | bits),
            Self::Ends => difference.after.is_none(),
            Self::Begins => difference.before.is_none(),
        }
    }
}

impl Expected {
    /// A row of a table.
    pub const fn row(place: &'static str, rule: Rule, reason: &'static str) -> Self {
        Self { place, rule, reason }
    }

    /// Whether it explains a difference.
    pub fn explains(&self, difference: &Difference) -> bool {
        is_at(self.place, &difference.place) && self.rule.permits(difference)
    }
}

/// Whether a place matches a pattern.
fn is_at(pattern: &str, place: &str) -> bool {
    let (mut pattern, mut place) = (pattern.split('/'), place.split('/'));
    loop {
        match (pattern.next(), place.next()) {
            (None, None) | (Some("**"), Some(_)) => return true,
            (Some("*"), Some(_)) => {}
            (Some(wanted), Some(found)) if wanted == found => {}
            _ => return false,
        }
    }
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shown = |value: &Option<String>| match value {
            None => "absent".to_owned(),
            Some(text) if text.len() > 160 => {
                let part: String = text.chars().take(150).collect();
                format!("'{part}...' of {} bytes", text.len())
            }
            Some(text) => format!("'{text}'"),
        };
        write!(f, "{}: {} became {}", self.place, shown(&self.before), shown(&self.after))
    }
}

impl Facts {
    /// Adds a fact, in the place of an earlier one.
    pub fn add(&mut self, place: impl Into<String>, value: impl fmt::Display) {
        self.0.insert(place.into(), value.to_string());
    }

    /// Adds a value to those of a place, which have no order.
    pub fn add_one_of(&mut self, place: impl Into<String>, value: impl fmt::Display) {
        let text = self.0.entry(place.into()).or_default();
        let value = value.to_string();
        let mut all: Vec<&str> = text.lines().chain([value.as_str()]).collect();
        all.sort_unstable();
        *text = all.join("\n");
    }

    /// All facts, by place.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &str)> {
        self.0.iter().map(|(place, value)| (place.as_str(), value.as_str()))
    }

    /// The value at a place.
    pub fn get(&self, place: &str) -> Option<&str> {
        self.0.get(place).map(String::as_str)
    }

    /// The number of facts.
    pub fn len(&self) -> usize {
        self.0.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// All differences.
    pub fn differences(&self, after: &Self) -> Vec<Difference> {
        let one = |place: &String, before: Option<&String>, after: Option<&String>| Difference {
            place: place.clone(),
            before: before.cloned(),
            after: after.cloned(),
        };
        let mut all: Vec<Difference> = self
            .0
            .iter()
            .filter(|(place, value)| after.0.get(*place) != Some(*value))
            .map(|(place, value)| one(place, Some(value), after.0.get(place)))
            .collect();
        let new = after.0.iter().filter(|(place, _)| !self.0.contains_key(*place));
        all.extend(new.map(|(place, value)| one(place, None, Some(value))));
        all
    }
}

/// The differences that no row of the table explains.
pub fn unexplained(differences: Vec<Difference>, table: &[Expected]) -> Vec<Difference> {
    let is_open = |difference: &Difference| !table.iter().any(|row| row.explains(difference));
    differences.into_iter().filter(is_open).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn facts(all: &[(&str, &str)]) -> Facts {
        let mut facts = Facts::default();
        all.iter().for_each(|(place, value)| facts.add(*place, value));
        facts
    }

    #[test]
    fn differences_name_changed_lost_and_new_facts() {
        let before = facts(&[("a/1", "x"), ("a/2", "y"), ("b", "1")]);
        let after = facts(&[("a/1", "x"), ("a/3", "z"), ("b", "2")]);
        let places: Vec<String> = before.differences(&after).into_iter().map(|d| d.place).collect();
        assert_eq!(places, ["a/2", "b", "a/3"]);
        assert_eq!(before.differences(&before), []);
    }

    #[test]
    fn a_row_explains_its_places_and_its_change_only() {
        let row = |place, rule| Expected { place, rule, reason: "" };
        let falls = &facts(&[("fd/3/left", "9")]).differences(&facts(&[("fd/3/left", "8")]))[0];
        assert!(row("fd/*/left", Rule::Falls(5)).explains(falls));
        assert!(row("fd/**", Rule::Any).explains(falls));
        assert!(!row("fd/*/left", Rule::Rises).explains(falls));
        assert!(!row("fd/*/left", Rule::Falls(0)).explains(falls));
        assert!(!row("fd/*", Rule::Any).explains(falls));
        assert!(!row("fd/*/left", Rule::Ends).explains(falls));
        let ends = &facts(&[("a", "9")]).differences(&Facts::default())[0];
        assert!(row("a", Rule::Ends).explains(ends) && !row("a", Rule::Falls(5)).explains(ends));
        let loses = &facts(&[("a", "sh mr me")]).differences(&facts(&[("a", "mr me")]))[0];
        assert!(row("a", Rule::Loses { word: "sh", without: "mw" }).explains(loses));
        assert!(!row("a", Rule::Loses { word: "sh", without: "mr" }).explains(loses));
        assert!(!row("a", Rule::Loses { word: "me", without: "mw" }).explains(loses));
        let gains = Rule::Gains { bits: 6, beside: 1 };
        let explains = |before: &str, after: &str| {
            let [before, after] = [before, after].map(|text| Some(text.to_owned()));
            row("a", gains).explains(&Difference { place: "a".into(), before, after })
        };
        assert!(explains("1", "7") && explains("0", "6"));
        assert!(!explains("1", "3") && !explains("8", "14") && !explains("7", "1"));
        assert!(row("fd/*/left", Rule::Turns { from: "9", to: "8" }).explains(falls));
        assert!(!row("fd/*/left", Rule::Turns { from: "8", to: "9" }).explains(falls));
        let left = unexplained(vec![ends.clone()], &[row("b", Rule::Any)]);
        assert_eq!(left, std::slice::from_ref(ends));
    }
}
