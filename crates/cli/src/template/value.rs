//! Values of templates, made from any serializable type.
//!
//! A struct and a map differ as in Go: a missing field of a struct is an error, a missing key of a map
//! has no value. Uses nothing of this crate.

use std::cmp::Ordering;
use std::fmt::{self, Display, Write as _};

use serde::Serialize;
use serde::ser::{self, SerializeMap, Serializer};

use crate::text::printable;

/// A value.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Value {
    /// No value.
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// Another number.
    Float(f64),
    /// A text of the data. It may hold control characters, which are shown in visible form.
    Text(String),
    /// A text of the template, or the result of a function.
    Made(String),
    /// A list.
    List(Vec<Value>),
    /// Keys and values in their order; the keys depend on the data.
    Map(Vec<(String, Value)>),
    /// Fields and values in their order; the fields are always the same.
    Struct(Vec<(String, Value)>),
}

impl Value {
    /// Makes a value of data.
    pub(crate) fn of<T: Serialize + ?Sized>(data: &T) -> Result<Self, Failed> {
        data.serialize(Maker)
    }

    /// Returns whether `if`, `and`, `or` and `not` count it as true.
    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::None => false,
            Self::Bool(b) => *b,
            Self::Int(n) => *n != 0,
            Self::Float(n) => *n != 0.0,
            Self::Text(t) | Self::Made(t) => !t.is_empty(),
            Self::List(l) => !l.is_empty(),
            Self::Map(m) => !m.is_empty(),
            Self::Struct(_) => true,
        }
    }

    /// The kind of value, for messages.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::None => "no value",
            Self::Bool(_) => "a truth value",
            Self::Int(_) | Self::Float(_) => "a number",
            Self::Text(_) | Self::Made(_) => "a text",
            Self::List(_) => "a list",
            Self::Map(_) => "a map",
            Self::Struct(_) => "an object",
        }
    }

    /// Compares two numbers or two texts.
    pub(super) fn compare(&self, other: &Self) -> Option<Ordering> {
        match (self, other) {
            (Self::Int(a), Self::Int(b)) => Some(a.cmp(b)),
            (Self::Int(a), Self::Float(b)) => (*a as f64).partial_cmp(b),
            (Self::Float(a), Self::Int(b)) => a.partial_cmp(&(*b as f64)),
            (Self::Float(a), Self::Float(b)) => a.partial_cmp(b),
            (Self::Text(a) | Self::Made(a), Self::Text(b) | Self::Made(b)) => Some(a.cmp(b)),
            (Self::Bool(a), Self::Bool(b)) => Some(a.cmp(b)),
            _ => None,
        }
    }

    /// The text as it is printed, with control characters of the data in visible form.
    pub(super) fn shown(&self) -> String {
        self.to_string()
    }
}

/// As Go prints values: `[a b]`, `map[k:v]`, `{a b}`.
impl Display for Value {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = "";
        let mut next = |f: &mut fmt::Formatter<'_>| {
            let now = std::mem::replace(&mut separator, " ");
            f.write_str(now)
        };
        match self {
            Self::None => f.write_str("<no value>"),
            Self::Bool(b) => write!(f, "{b}"),
            Self::Int(n) => write!(f, "{n}"),
            Self::Float(n) => write!(f, "{n}"),
            Self::Text(t) => f.write_str(&printable(t)),
            Self::Made(t) => f.write_str(t),
            Self::List(list) => {
                f.write_char('[')?;
                for item in list {
                    next(f)?;
                    item.fmt(f)?;
                }
                f.write_char(']')
            }
            Self::Map(entries) => {
                f.write_str("map[")?;
                let mut sorted: Vec<_> = entries.iter().collect();
                sorted.sort_by(|a, b| a.0.cmp(&b.0));
                for (key, value) in sorted {
                    next(f)?;
                    write!(f, "{}:{value}", printable(key))?;
                }
                f.write_char(']')
            }
            Self::Struct(fields) => {
                f.write_char('{')?;
                for (_, value) in fields {
                    next(f)?;
                    value.fmt(f)?;
                }
                f.write_char('}')
            }
        }
    }
}

/// As JSON, with the fields in their order.
impl Serialize for Value {
    fn serialize<S: Serializer>(&self, out: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::None => out.serialize_unit(),
            Self::Bool(b) => out.serialize_bool(*b),
            Self::Int(n) => out.serialize_i64(*n),
            Self::Float(n) => out.serialize_f64(*n),
            Self::Text(t) | Self::Made(t) => out.serialize_str(t),
            Self::List(list) => list.serialize(out),
            Self::Map(entries) | Self::Struct(entries) => {
                let mut map = out.serialize_map(Some(entries.len()))?;
                for (key, value) in entries {
                    map.serialize_entry(key, value)?;
                }
                map.end()
            }
        }
    }
}

/// A reason why a template cannot be used.
#[derive(Debug)]
pub(crate) struct Invalid(String);

impl Invalid {
    pub(super) fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Display for Invalid {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Invalid {}

/// Returns a field of an object, or the value of a key of a map.
pub(super) fn field<'v>(value: &'v Value, name: &str) -> Result<&'v Value, Invalid> {
    let find = |entries: &'v [(String, Value)]| entries.iter().find(|(key, _)| key == name);
    match value {
        Value::Map(entries) => Ok(find(entries).map_or(&Value::None, |(_, value)| value)),
        Value::Struct(fields) => match find(fields) {
            Some((_, value)) => Ok(value),
            None => {
                let names: Vec<&str> = fields.iter().map(|(key, _)| key.as_str()).collect();
                let text = format!("no field is called '{name}'; there are {}", names.join(", "));
                Err(Invalid::new(text))
            }
        },
        other => Err(Invalid::new(format!("{} has no field '{name}'", other.kind()))),
    }
}

/// Data that has no value.
#[derive(Debug)]
pub(crate) struct Failed(String);

impl Display for Failed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Failed {}

impl ser::Error for Failed {
    fn custom<T: Display>(text: T) -> Self {
        Self(text.to_string())
    }
}

/// Makes values (serde's data model).
struct Maker;

/// A list, map or struct in the making. `key` is that of the next value.
struct Parts {
    items: Vec<Value>,
    entries: Vec<(String, Value)>,
    key: String,
    variant: Option<&'static str>,
    kind: fn(Parts) -> Value,
}

impl Parts {
    fn new(variant: Option<&'static str>, kind: fn(Self) -> Value) -> Self {
        Self { items: Vec::new(), entries: Vec::new(), key: String::new(), variant, kind }
    }

    fn item<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Failed> {
        self.items.push(value.serialize(Maker)?);
        Ok(())
    }

    fn entry<T: Serialize + ?Sized>(&mut self, key: &str, value: &T) -> Result<(), Failed> {
        self.entries.push((key.to_owned(), value.serialize(Maker)?));
        Ok(())
    }

    fn finish(self) -> Result<Value, Failed> {
        let (variant, kind) = (self.variant, self.kind);
        let value = kind(self);
        Ok(match variant {
            None => value,
            Some(name) => Value::Map(vec![(name.to_owned(), value)]),
        })
    }
}

/// Methods of a serializer for the kinds of numbers.
macro_rules! numbers {
    ($($method:ident($kind:ty))*) => {
        $(fn $method(self, n: $kind) -> Result<Value, Failed> {
            Ok(i64::try_from(n).map_or(Value::Float(n as f64), Value::Int))
        })*
    };
}

impl Serializer for Maker {
    type Ok = Value;
    type Error = Failed;
    type SerializeSeq = Parts;
    type SerializeTuple = Parts;
    type SerializeTupleStruct = Parts;
    type SerializeTupleVariant = Parts;
    type SerializeMap = Parts;
    type SerializeStruct = Parts;
    type SerializeStructVariant = Parts;

    numbers! {
        serialize_i8(i8) serialize_i16(i16) serialize_i32(i32) serialize_i64(i64)
        serialize_u8(u8) serialize_u16(u16) serialize_u32(u32) serialize_u64(u64)
    }

    fn serialize_bool(self, b: bool) -> Result<Value, Failed> {
        Ok(Value::Bool(b))
    }

    fn serialize_f32(self, n: f32) -> Result<Value, Failed> {
        Ok(Value::Float(n.into()))
    }

    fn serialize_f64(self, n: f64) -> Result<Value, Failed> {
        Ok(Value::Float(n))
    }

    fn serialize_char(self, c: char) -> Result<Value, Failed> {
        Ok(Value::Text(c.into()))
    }

    fn serialize_str(self, text: &str) -> Result<Value, Failed> {
        Ok(Value::Text(text.to_owned()))
    }

    fn serialize_bytes(self, bytes: &[u8]) -> Result<Value, Failed> {
        Ok(Value::List(bytes.iter().map(|byte| Value::Int((*byte).into())).collect()))
    }

    fn serialize_none(self) -> Result<Value, Failed> {
        Ok(Value::None)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<Value, Failed> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<Value, Failed> {
        Ok(Value::None)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<Value, Failed> {
        Ok(Value::None)
    }

    fn serialize_unit_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
    ) -> Result<Value, Failed> {
        Ok(Value::Text(variant.to_owned()))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<Value, Failed> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        value: &T,
    ) -> Result<Value, Failed> {
        Ok(Value::Map(vec![(variant.to_owned(), value.serialize(Self)?)]))
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Parts, Failed> {
        Ok(Parts::new(None, |parts| Value::List(parts.items)))
    }

    fn serialize_tuple(self, _: usize) -> Result<Parts, Failed> {
        self.serialize_seq(None)
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Parts, Failed> {
        self.serialize_seq(None)
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Parts, Failed> {
        Ok(Parts::new(Some(variant), |parts| Value::List(parts.items)))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Parts, Failed> {
        Ok(Parts::new(None, |parts| Value::Map(parts.entries)))
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Parts, Failed> {
        Ok(Parts::new(None, |parts| Value::Struct(parts.entries)))
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Parts, Failed> {
        Ok(Parts::new(Some(variant), |parts| Value::Struct(parts.entries)))
    }
}

/// Implementations whose only method takes one item.
macro_rules! lists {
    ($($kind:ident $method:ident)*) => {
        $(impl ser::$kind for Parts {
            type Ok = Value;
            type Error = Failed;
            fn $method<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Failed> {
                self.item(value)
            }
            fn end(self) -> Result<Value, Failed> {
                self.finish()
            }
        })*
    };
}

lists! {
    SerializeSeq serialize_element
    SerializeTuple serialize_element
    SerializeTupleStruct serialize_field
    SerializeTupleVariant serialize_field
}

/// Implementations whose only method takes a field.
macro_rules! structs {
    ($($kind:ident)*) => {
        $(impl ser::$kind for Parts {
            type Ok = Value;
            type Error = Failed;
            fn serialize_field<T: Serialize + ?Sized>(
                &mut self,
                key: &'static str,
                value: &T,
            ) -> Result<(), Failed> {
                self.entry(key, value)
            }
            fn end(self) -> Result<Value, Failed> {
                self.finish()
            }
        })*
    };
}

structs! { SerializeStruct SerializeStructVariant }

impl ser::SerializeMap for Parts {
    type Ok = Value;
    type Error = Failed;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, key: &T) -> Result<(), Failed> {
        self.key = match key.serialize(Maker)? {
            Value::Text(text) => text,
            other => other.to_string(),
        };
        Ok(())
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Failed> {
        let key = std::mem::take(&mut self.key);
        self.entry(&key, value)
    }

    fn end(self) -> Result<Value, Failed> {
        self.finish()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    #[derive(Serialize)]
    struct Data {
        #[serde(rename = "Name")]
        name: &'static str,
        list: Vec<u32>,
        map: BTreeMap<&'static str, bool>,
        none: Option<()>,
    }

    #[test]
    fn value_is_printed_as_in_go_and_as_json() {
        let map = BTreeMap::from([("b", true), ("a", false)]);
        let data = Data { name: "x\x1b", list: vec![1, 2], map, none: None };
        let value = Value::of(&data).unwrap();
        assert_eq!(value.to_string(), "{x\\u{1b} [1 2] map[a:false b:true] <no value>}");
        let json = r#"{"Name":"x\u001b","list":[1,2],"map":{"a":false,"b":true},"none":null}"#;
        assert_eq!(serde_json::to_string(&value).unwrap(), json);
    }
}
