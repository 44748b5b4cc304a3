//! Reading rows: jobs, and values that the drivers' decoders cannot read. No value makes reading a row fail.

use crate::fast_map::FastMap;
use crate::job::{Job, Place};
use chrono::{DateTime, Utc};
use serde_json::value::RawValue;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgHasArrayType, PgRow, PgTypeInfo, PgValueFormat, PgValueRef};
use sqlx::{Column, Postgres, Row, TypeInfo};
use std::collections::HashMap;
use std::sync::Arc;

/// A `timestamptz`. PostgreSQL stores times that chrono and JSON cannot represent (±infinity, 4713 BC, the
/// year 200000); the drivers' decoders panic or fail on them, for the whole result. Here they are clamped to
/// the years 1 to 9999, so that one odd row only loses its own precision.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Time(pub(crate) DateTime<Utc>);

impl Time {
    /// From PostgreSQL's binary format: microseconds since 2000; the smallest and the largest value mean
    /// ±infinity.
    fn from_binary(micros: i64) -> Time {
        const YEAR_2000: i64 = 946_684_800_000_000;
        const FIRST: i64 = -62_135_596_800_000_000; // 0001-01-01
        const LAST: i64 = 253_402_214_400_000_000; // 9999-12-31
        let micros = micros.saturating_add(YEAR_2000).clamp(FIRST, LAST);
        Time(DateTime::from_timestamp_micros(micros).unwrap_or_default())
    }
}

impl sqlx::Type<Postgres> for Time {
    fn type_info() -> PgTypeInfo {
        <DateTime<Utc> as sqlx::Type<Postgres>>::type_info()
    }
}

impl<'r> sqlx::Decode<'r, Postgres> for Time {
    fn decode(value: PgValueRef<'r>) -> Result<Time, BoxDynError> {
        match value.format() {
            PgValueFormat::Binary => Ok(Time::from_binary(i64::from_be_bytes(value.as_bytes()?.try_into()?))),
            PgValueFormat::Text => sqlx::Decode::<Postgres>::decode(value).map(Time),
        }
    }
}

#[cfg(feature = "tokio-postgres")]
impl<'a> ::tokio_postgres::types::FromSql<'a> for Time {
    fn from_sql(_: &::tokio_postgres::types::Type, raw: &'a [u8]) -> Result<Time, BoxDynError> {
        Ok(Time::from_binary(i64::from_be_bytes(raw.try_into()?)))
    }

    fn accepts(of: &::tokio_postgres::types::Type) -> bool {
        *of == ::tokio_postgres::types::Type::TIMESTAMPTZ
    }
}

/// A text. In a database without an encoding it may contain any bytes: those that are not UTF-8 become
/// `U+FFFD`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Text {
    pub(crate) text: String,
    /// Whether the stored text was valid UTF-8.
    pub(crate) is_utf8: bool,
}

impl Text {
    fn from_bytes(bytes: &[u8]) -> Text {
        // First without `from_utf8_lossy`, which is slower.
        match std::str::from_utf8(bytes) {
            Ok(text) => Text { text: text.to_owned(), is_utf8: true },
            Err(_) => Text { text: String::from_utf8_lossy(bytes).into_owned(), is_utf8: false },
        }
    }
}

impl sqlx::Type<Postgres> for Text {
    fn type_info() -> PgTypeInfo {
        <String as sqlx::Type<Postgres>>::type_info()
    }

    fn compatible(of: &PgTypeInfo) -> bool {
        <String as sqlx::Type<Postgres>>::compatible(of)
    }
}

impl PgHasArrayType for Text {
    fn array_type_info() -> PgTypeInfo {
        <String as PgHasArrayType>::array_type_info()
    }
}

impl<'r> sqlx::Decode<'r, Postgres> for Text {
    fn decode(value: PgValueRef<'r>) -> Result<Text, BoxDynError> {
        value.as_bytes().map(Text::from_bytes)
    }
}

#[cfg(feature = "tokio-postgres")]
impl<'a> ::tokio_postgres::types::FromSql<'a> for Text {
    fn from_sql(_: &::tokio_postgres::types::Type, raw: &'a [u8]) -> Result<Text, BoxDynError> {
        Ok(Text::from_bytes(raw))
    }

    fn accepts(of: &::tokio_postgres::types::Type) -> bool {
        <String as ::tokio_postgres::types::FromSql>::accepts(of)
    }
}

/// The text in a column.
pub(crate) fn text(row: &PgRow, column: &str) -> sqlx::Result<String> {
    row.try_get(column).map(|Text { text, .. }| text)
}

/// The text in a column that may be null.
pub(crate) fn optional_text(row: &PgRow, column: &str) -> sqlx::Result<Option<String>> {
    row.try_get(column).map(|text: Option<Text>| text.map(|Text { text, .. }| text))
}

/// The texts of an array.
pub(crate) fn texts(row: &PgRow, column: &str) -> sqlx::Result<Vec<String>> {
    row.try_get(column).map(|texts: Vec<Text>| texts.into_iter().map(|Text { text, .. }| text).collect())
}

/// The time in a column.
pub(crate) fn time(row: &PgRow, column: &str) -> sqlx::Result<DateTime<Utc>> {
    row.try_get(column).map(|Time(time)| time)
}

/// The time in a column that may be null.
pub(crate) fn optional_time(row: &PgRow, column: &str) -> sqlx::Result<Option<DateTime<Utc>>> {
    row.try_get(column).map(|time: Option<Time>| time.map(|Time(time)| time))
}

/// The flags of a job, a `jsonb`. Reading never fails: a number that does not fit into an `f64` becomes a
/// string of its digits, and so does a value that is nested too deeply.
#[derive(Debug, PartialEq)]
pub(crate) struct Flags(pub(crate) serde_json::Value);

impl Flags {
    /// From PostgreSQL's binary format: a version number, then the text.
    fn from_binary(bytes: &[u8]) -> Result<Flags, BoxDynError> {
        match bytes {
            [1, text @ ..] => Ok(Flags(lenient(&String::from_utf8_lossy(text), 0))),
            _ => Err("jsonb of an unknown version".into()),
        }
    }
}

fn lenient(text: &str, depth: usize) -> serde_json::Value {
    use serde_json::Value;
    /// serde_json's own limit.
    const DEEPEST: usize = 127;
    let unchanged = || Value::String(text.to_owned());
    if let Ok(value) = serde_json::from_str(text) {
        return value;
    }
    if depth > DEEPEST {
        return unchanged();
    }
    let deeper = |value: &RawValue| lenient(value.get(), depth + 1);
    if let Ok(object) = serde_json::from_str::<HashMap<String, &RawValue>>(text) {
        return Value::Object(object.into_iter().map(|(key, value)| (key, deeper(value))).collect());
    }
    match serde_json::from_str::<Vec<&RawValue>>(text) {
        Ok(array) => Value::Array(array.into_iter().map(deeper).collect()),
        Err(_) => unchanged(),
    }
}

impl sqlx::Type<Postgres> for Flags {
    fn type_info() -> PgTypeInfo {
        <serde_json::Value as sqlx::Type<Postgres>>::type_info()
    }
}

impl<'r> sqlx::Decode<'r, Postgres> for Flags {
    fn decode(value: PgValueRef<'r>) -> Result<Flags, BoxDynError> {
        match value.format() {
            PgValueFormat::Binary => Flags::from_binary(value.as_bytes()?),
            PgValueFormat::Text => Ok(Flags(lenient(&String::from_utf8_lossy(value.as_bytes()?), 0))),
        }
    }
}

#[cfg(feature = "tokio-postgres")]
impl<'a> ::tokio_postgres::types::FromSql<'a> for Flags {
    fn from_sql(_: &::tokio_postgres::types::Type, raw: &'a [u8]) -> Result<Flags, BoxDynError> {
        Flags::from_binary(raw)
    }

    fn accepts(of: &::tokio_postgres::types::Type) -> bool {
        *of == ::tokio_postgres::types::Type::JSONB
    }
}

/// In PostgreSQL's binary format, as a `bytea`: sqlx would look up the type `tid` in each new connection.
impl sqlx::Type<Postgres> for Place {
    fn type_info() -> PgTypeInfo {
        <[u8] as sqlx::Type<Postgres>>::type_info()
    }
}

impl<'r> sqlx::Decode<'r, Postgres> for Place {
    fn decode(value: PgValueRef<'r>) -> Result<Place, BoxDynError> {
        let [a, b, c, d, e, f] = *<&[u8; 6]>::try_from(value.as_bytes()?)?;
        Ok(Place { page: u32::from_be_bytes([a, b, c, d]), item: u16::from_be_bytes([e, f]) })
    }
}

/// The text of an array of places, for the same reason.
pub(crate) fn array_of_places(places: impl Iterator<Item = Place>) -> String {
    let mut array = "{".to_owned();
    for Place { page, item } in places {
        array.push_str(if array.len() > 1 { ",\"(" } else { "\"(" });
        push_number(&mut array, page);
        array.push(',');
        push_number(&mut array, item.into());
        array.push_str(")\"");
    }
    array.push('}');
    array
}

/// With it, a place takes 260 instructions; with `format!` and `join`, it took 1,260.
fn push_number(text: &mut String, number: u32) {
    if number > 9 {
        push_number(text, number / 10);
    }
    text.push(char::from(b'0' + (number % 10) as u8));
}

/// Where the values of a [`Job`] are in a row: the names of the columns, or their positions.
pub(crate) struct JobColumns<C> {
    pub(crate) id: C,
    pub(crate) payload: C,
    pub(crate) job_queue_id: C,
    pub(crate) priority: C,
    pub(crate) run_at: C,
    pub(crate) attempts: C,
    pub(crate) max_attempts: C,
    pub(crate) last_error: C,
    pub(crate) created_at: C,
    pub(crate) updated_at: C,
    pub(crate) key: C,
    pub(crate) locked_at: C,
    pub(crate) revision: C,
    pub(crate) flags: C,
}

impl JobColumns<&'static str> {
    pub(crate) const NAMES: Self = JobColumns {
        id: "id",
        payload: "payload",
        job_queue_id: "job_queue_id",
        priority: "priority",
        run_at: "run_at",
        attempts: "attempts",
        max_attempts: "max_attempts",
        last_error: "last_error",
        created_at: "created_at",
        updated_at: "updated_at",
        key: "key",
        locked_at: "locked_at",
        revision: "revision",
        flags: "flags",
    };
}

impl JobColumns<usize> {
    fn of(row: &PgRow) -> sqlx::Result<Self> {
        let names = JobColumns::NAMES;
        Ok(JobColumns {
            id: position::<i64>(row, names.id)?,
            payload: position::<Text>(row, names.payload)?,
            job_queue_id: position::<i32>(row, names.job_queue_id)?,
            priority: position::<i16>(row, names.priority)?,
            run_at: position::<Time>(row, names.run_at)?,
            attempts: position::<i16>(row, names.attempts)?,
            max_attempts: position::<i16>(row, names.max_attempts)?,
            last_error: position::<Text>(row, names.last_error)?,
            created_at: position::<Time>(row, names.created_at)?,
            updated_at: position::<Time>(row, names.updated_at)?,
            key: position::<Text>(row, names.key)?,
            locked_at: position::<Time>(row, names.locked_at)?,
            revision: position::<i32>(row, names.revision)?,
            flags: position::<Flags>(row, names.flags)?,
        })
    }
}

/// The position of a column whose values have this type.
fn position<T: sqlx::Type<Postgres>>(row: &PgRow, name: &str) -> sqlx::Result<usize> {
    let column = row.try_column(name)?;
    let (found, wanted) = (column.type_info(), T::type_info());
    if !found.is_null() && !T::compatible(found) {
        let source = format!("the type is {}, expected {}", found.name(), wanted.name()).into();
        return Err(sqlx::Error::ColumnDecode { index: name.to_owned(), source });
    }
    Ok(column.ordinal())
}

/// Builds a [`Job`] from a row of either driver, which `$get` reads by `$columns`. `$json` converts a parser's error into
/// the driver's.
///
/// Every value can be read: numbers have the range of their columns; [`Text`], [`Time`] and [`Flags`] never
/// fail; and `RawValue` accepts every text that PostgreSQL accepts as JSON. An error means that the columns
/// are not those of the contract.
macro_rules! job_from_row {
    ($row:ident.$get:ident, $columns:expr, $identifier:expr, $json:expr) => {{
        let columns = $columns;
        let payload: $crate::db::rows::Text = $row.$get(columns.payload)?;
        let last_error: Option<$crate::db::rows::Text> = $row.$get(columns.last_error)?;
        let key: Option<$crate::db::rows::Text> = $row.$get(columns.key)?;
        let run_at: $crate::db::rows::Time = $row.$get(columns.run_at)?;
        let created_at: $crate::db::rows::Time = $row.$get(columns.created_at)?;
        let updated_at: $crate::db::rows::Time = $row.$get(columns.updated_at)?;
        let locked_at: Option<$crate::db::rows::Time> = $row.$get(columns.locked_at)?;
        let flags: Option<$crate::db::rows::Flags> = $row.$get(columns.flags)?;
        Ok(Job {
            id: $row.$get(columns.id)?,
            task_identifier: $identifier,
            payload: RawValue::from_string(payload.text).map_err($json)?,
            is_utf8: payload.is_utf8,
            place: None,
            expiry: None,
            job_queue_id: $row.$get(columns.job_queue_id)?,
            priority: $row.$get(columns.priority)?,
            run_at: run_at.0,
            attempts: $row.$get(columns.attempts)?,
            max_attempts: $row.$get(columns.max_attempts)?,
            last_error: last_error.map(|error| error.text),
            created_at: created_at.0,
            updated_at: updated_at.0,
            key: key.map(|key| key.text),
            locked_at: locked_at.map(|time| time.0),
            revision: $row.$get(columns.revision)?,
            flags: flags.map(|flags| flags.0),
        })
    }};
}

#[cfg(feature = "tokio-postgres")]
pub(crate) use job_from_row;

/// A job from a row that contains the name of its task.
pub(crate) fn job(row: &PgRow) -> sqlx::Result<Job> {
    read_job(row, &JobColumns::of(row)?, text(row, "task_identifier")?.into())
}

/// Reads the jobs of one answer. Finds the columns and checks their types once and not for each row: to look up names and
/// types took a third of the worker's time (bench/RESULTS.md, "The client").
pub(crate) struct JobReader<'n> {
    task_names: &'n FastMap<i32, Arc<str>>,
    columns: Option<ClaimColumns>,
}

struct ClaimColumns {
    job: JobColumns<usize>,
    task_id: usize,
    /// Only in the short exchange.
    place: Option<usize>,
}

impl ClaimColumns {
    fn of(row: &PgRow) -> sqlx::Result<ClaimColumns> {
        let has_place = row.try_column("place").is_ok();
        let place = has_place.then(|| position::<Place>(row, "place")).transpose()?;
        Ok(ClaimColumns { job: JobColumns::of(row)?, task_id: position::<i32>(row, "task_id")?, place })
    }
}

impl<'n> JobReader<'n> {
    pub(crate) fn new(task_names: &'n FastMap<i32, Arc<str>>) -> JobReader<'n> {
        JobReader { task_names, columns: None }
    }

    /// The job in a row; `None` if its task has no name here.
    pub(crate) fn read(&mut self, row: &PgRow) -> sqlx::Result<Option<Job>> {
        let columns = match &self.columns {
            Some(columns) => columns,
            None => self.columns.insert(ClaimColumns::of(row)?),
        };
        let Some(identifier) = self.task_names.get(&row.try_get_unchecked(columns.task_id)?) else { return Ok(None) };
        let mut job = read_job(row, &columns.job, identifier.clone())?;
        if let Some(place) = columns.place {
            job.place = row.try_get_unchecked(place)?;
        }
        Ok(Some(job))
    }
}

fn read_job(row: &PgRow, columns: &JobColumns<usize>, task_identifier: Arc<str>) -> sqlx::Result<Job> {
    job_from_row!(row.try_get_unchecked, columns, task_identifier, |error| sqlx::Error::Decode(error.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_that_chrono_or_json_cannot_represent_are_clamped() {
        let time = |micros| Time::from_binary(micros).0.to_rfc3339();
        assert_eq!(time(0), "2000-01-01T00:00:00+00:00");
        assert_eq!(time(-1), "1999-12-31T23:59:59.999999+00:00");
        for (micros, clamped) in [(i64::MAX, "9999-12-31T00:00:00+00:00"), (i64::MIN, "0001-01-01T00:00:00+00:00")] {
            assert_eq!(time(micros), clamped);
            assert_eq!(time(micros / 2), clamped);
        }
    }

    #[test]
    fn places_are_written_as_postgresql_writes_them() {
        let place = |page, item| Place { page, item };
        let array = |places: &[Place]| array_of_places(places.iter().copied());
        assert_eq!(array(&[]), "{}");
        assert_eq!(array(&[place(0, 1), place(u32::MAX, 70)]), r#"{"(0,1)","(4294967295,70)"}"#);
    }

    #[test]
    fn flags_keep_unrepresentable_values_as_text() {
        let flags = |text: &str| lenient(text, 0);
        assert_eq!(flags(r#"{"a": true}"#), serde_json::json!({"a": true}));
        assert_eq!(flags(r#"{"a": [true, {"b": 1e400}]}"#), serde_json::json!({"a": [true, {"b": "1e400"}]}));
        assert_eq!(flags("-1e400"), serde_json::json!("-1e400"));
        let deep = format!("{}{}", "[".repeat(5000), "]".repeat(5000));
        assert!(flags(&deep).is_array());
    }
}
