//! Payloads: parses a JSON5 object into a JSON object, and rejects what the database cannot store.

use crate::error::Problem;
use serde::Deserialize;
use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use std::fmt;

/// Parsing recurses with each level.
const DEEPEST: usize = 100;
/// From here on, doubles cannot represent every integer.
const LARGEST_EXACT: f64 = 9_007_199_254_740_992.0;

const TOO_DEEP: &str = "payload is nested more than 100 levels deep";
const NUL: &str = "payload contains a NUL character, which the database does not accept";

/// Parses the object, which starts at byte `at` of its line.
pub(crate) fn read(text: &str, at: usize) -> Result<Map<String, Value>, Problem> {
    match json5::from_str(text) {
        Ok(Payload(Value::Object(payload))) => Ok(payload),
        Ok(_) => Err(Problem::at(at, at + text.len(), "payload is not an object, expected one like `{key: 'value'}`")),
        Err(error) => Err(problem(&error, text, at)),
    }
}

/// Rejects what [`read`] would reject.
pub(crate) fn check(payload: &Map<String, Value>) -> Result<(), String> {
    check_object(payload, 1)
}

fn check_object(object: &Map<String, Value>, level: usize) -> Result<(), String> {
    object.iter().try_for_each(|(key, value)| {
        check_text(key)?;
        check_value(value, level + 1)
    })
}

fn check_value(value: &Value, level: usize) -> Result<(), String> {
    match value {
        Value::Array(_) | Value::Object(_) if level > DEEPEST => Err(TOO_DEEP.to_owned()),
        Value::Array(values) => values.iter().try_for_each(|value| check_value(value, level + 1)),
        Value::Object(object) => check_object(object, level),
        Value::String(text) => check_text(text),
        Value::Null | Value::Bool(_) | Value::Number(_) => Ok(()),
    }
}

fn check_text(text: &str) -> Result<(), String> {
    if text.contains('\0') { Err(NUL.to_owned()) } else { Ok(()) }
}

/// Converts the parser's error, with its position in the line. The parser reports lines and columns of the
/// payload.
fn problem(error: &json5::Error, text: &str, at: usize) -> Problem {
    let whole = error.to_string();
    let reason = whole.rsplit_once(" at line ").map_or(whole.as_str(), |(reason, _)| reason);
    if reason.starts_with("payload ") {
        return Problem::at(at, at + text.len(), reason);
    }
    if reason.starts_with("EOF") {
        let last = text.char_indices().last().map_or(0, |(last, _)| last);
        return Problem::at(at + last, at + text.len(), "payload is incomplete");
    }
    let column = error.position().map_or(0, |position| position.column);
    let (offset, found) = text.char_indices().nth(column).unwrap_or((0, '{'));
    let message = format!("payload is not JSON5 at `{found}`: {reason}");
    Problem::at(at + offset, at + offset + found.len_utf8(), message)
}

struct Payload(Value);

impl<'de> Deserialize<'de> for Payload {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Payload, D::Error> {
        Level(1).deserialize(deserializer).map(Payload)
    }
}

/// A value at a level of nesting, from 1.
struct Level(usize);

impl<'de> DeserializeSeed<'de> for Level {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Level {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON5 value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    /// As in JavaScript: `1e3` becomes 1000, and NaN and infinity become null.
    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        if value.fract() == 0.0 && value.abs() <= LARGEST_EXACT {
            return Ok((value as i64).into());
        }
        Ok(Number::from_f64(value).map_or(Value::Null, Value::Number))
    }

    fn visit_str<E: serde::de::Error>(self, value: &str) -> Result<Value, E> {
        check_text(value).map_err(E::custom)?;
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let inner = self.inside()?;
        let mut values = Vec::new();
        while let Some(value) = access.next_element_seed(Level(inner))? {
            values.push(value);
        }
        Ok(Value::Array(values))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let inner = self.inside()?;
        let mut object = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            check_text(&key).map_err(A::Error::custom)?;
            object.insert(key, access.next_value_seed(Level(inner))?);
        }
        Ok(Value::Object(object))
    }
}

impl Level {
    /// The nesting level of the elements of an array or an object.
    fn inside<E: serde::de::Error>(&self) -> Result<usize, E> {
        if self.0 > DEEPEST { Err(E::custom(TOO_DEEP)) } else { Ok(self.0 + 1) }
    }
}
