//! Text from outside, made harmless for a terminal.

use std::borrow::Cow;

/// Escapes control characters, so that the text has no effect on a terminal.
///
/// Names, labels and commands come from images and containers, which are not trusted with escape
/// sequences.
pub(crate) fn printable(text: &str) -> Cow<'_, str> {
    if text.contains(is_hostile) {
        let mut clean = String::with_capacity(text.len() + 8);
        for c in text.chars() {
            if is_hostile(c) { clean.extend(c.escape_default()) } else { clean.push(c) }
        }
        Cow::Owned(clean)
    } else {
        Cow::Borrowed(text)
    }
}

/// Whether a character controls a terminal or changes the direction of the following text.
pub(crate) fn is_hostile(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}
