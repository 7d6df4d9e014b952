//! Images.

use serde::Serialize;

/// An image in `inspect --json`.
#[derive(Debug, Serialize)]
pub struct Image<'a> {
    /// 64 hex digits.
    pub id: &'a str,
    /// The names; none for an image whose name was given to another.
    pub names: Vec<String>,
    /// The digest by which a registry names it.
    pub digest: Option<String>,
    /// Time of creation, as the image's configuration has it.
    pub created: Option<&'a str>,
    /// Bytes of its files as the tree shows them.
    pub size_bytes: u64,
    /// The digests of its layers without compression.
    pub layers: Vec<String>,
    /// The OCI image configuration, with the fields of each object sorted by name.
    pub config: serde_json::Value,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn image_has_its_fields_in_the_printed_order() {
        let image = Image {
            id: "ab",
            names: vec!["docker.io/library/alpine:3".into()],
            digest: None,
            created: Some("2026-01-01T00:00:00Z"),
            size_bytes: 1,
            layers: vec!["sha256:00".into()],
            config: serde_json::json!({ "os": "linux", "architecture": "amd64" }),
        };
        let json = concat!(
            r#"{"id":"ab","names":["docker.io/library/alpine:3"],"digest":null,"#,
            r#""created":"2026-01-01T00:00:00Z","size_bytes":1,"layers":["sha256:00"],"#,
            r#""config":{"architecture":"amd64","os":"linux"}}"#,
        );
        assert_eq!(serde_json::to_string(&image).unwrap(), json);
    }
}
