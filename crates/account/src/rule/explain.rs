//! Which rule decides a passage, and why.

use super::compile::Compiled;
use super::table::Passage;
use super::text::{Origin, Rule};

/// The decision about a passage.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation<'r> {
    /// The rule that decides; without one, the label is kept.
    pub decides: Option<&'r Rule>,
    /// The label afterwards.
    pub label: u32,
    /// All other rules that match, in the order of their rank.
    pub others: Vec<Other<'r>>,
}

/// A rule that matches a passage and does not decide it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Other<'r> {
    /// The rule.
    pub rule: &'r Rule,
    /// The reason.
    pub why: String,
}

impl Compiled {
    /// Returns the rule that decides a passage, and those that would without it.
    pub fn explain(&self, passage: &Passage<'_>) -> Explanation<'_> {
        let matching =
            |(index, row)| self.table.is_match(row, passage).then(|| self.rule(index))?;
        let mut found = self.table.rows.iter().enumerate().filter_map(matching);
        let decides = found.next();
        let others = found.map(|rule| {
            let why = decides.map_or_else(String::new, |first| self.why_behind(first, rule));
            Other { rule, why }
        });
        Explanation { decides, others: others.collect(), label: self.table.label(passage) }
    }

    fn why_behind(&self, first: &Rule, rule: &Rule) -> String {
        match (first.priority, rule.priority) {
            (Some(_), None) if matches!(rule.origin, Origin::Shared(_)) => {
                "rules of shared containers rank below all others".into()
            }
            (Some(higher), Some(lower)) if higher != lower => {
                format!("its priority, {lower}, is below {higher}")
            }
            _ if self.is_narrower(first, rule) => format!("{first} is more specific"),
            _ => format!("it has the same rank and the same account as {first}"),
        }
    }
}
