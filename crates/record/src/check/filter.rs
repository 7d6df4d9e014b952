//! Checks of packet filters (libnftables-json(5)).

use serde_json::Value;

/// The kinds of entries in a list of rules (libnftables-json(5)).
const KINDS: [&str; 7] = ["table", "chain", "rule", "set", "map", "counter", "quota"];
/// LIMIT: bytes of all tables.
pub const BYTES_MAX: usize = 4 << 20;

/// Checks that a record of tables is valid, and contains nothing that nft would take for more.
pub fn check(text: &str) -> Result<(), String> {
    if text.is_empty() {
        return Ok(());
    }
    if text.len() > BYTES_MAX {
        return Err("it is too long".into());
    }
    let listed: Value = serde_json::from_str(text).map_err(|e| e.to_string())?;
    let all = listed.as_object().filter(|whole| whole.len() == 1);
    let all = all.and_then(|whole| whole.get("nftables")?.as_array());
    for one in all.ok_or("it is not a list of rules")? {
        let one = one.as_object().filter(|one| one.len() == 1);
        let kind = one.and_then(|one| one.keys().next()).ok_or("something in it is not a rule")?;
        if !KINDS.contains(&&**kind) {
            return Err(format!("it has a {kind:?}, which is not saved yet"));
        }
    }
    // ORDER: in the form in which nft gets it: nft reads text that is not JSON as its own language,
    // in which a string ends with the first quotation mark.
    match is_plain(&listed) {
        true => Ok(()),
        false => Err("a text in it has quotation marks or backslashes".into()),
    }
}

fn is_plain(value: &Value) -> bool {
    let is = |text: &str| !text.contains(|c: char| c == '"' || c == '\\' || c.is_control());
    match value {
        Value::String(text) => is(text),
        Value::Array(all) => all.iter().all(is_plain),
        Value::Object(all) => all.iter().all(|(key, value)| is(key) && is_plain(value)),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn filter_text_with_anything_but_rules_is_refused() {
        let good = r#"{"nftables":[{"table":{"family":"inet","name":"t"}}]}"#;
        assert_eq!((check(""), check(good)), (Ok(()), Ok(())));
        for (bad, why) in [
            ("include \"/etc/shadow\"", "expected value"),
            (r#"{"nftables":[],"more":1}"#, "not a list"),
            (r#"{"nftables":[{"flush":{"ruleset":null}}]}"#, "flush"),
            (r#"{"nftables":[{"table":{},"rule":{}}]}"#, "not a rule"),
            (r#"{"nftables":[{"table":{"name":"a\";include \"/etc/shadow"}}]}"#, "quotation"),
            (r#"{"nftables":[{"table":{"name\n":"a"}}]}"#, "quotation"),
            (r#"[]"#, "not a list"),
        ] {
            let said = check(bad).unwrap_err();
            assert!(said.contains(why), "{bad}: {said}");
        }
    }
}
