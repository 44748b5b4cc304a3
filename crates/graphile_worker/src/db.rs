//! The SQL files, with the schema's name put in. The only file that knows how a name is quoted.
//!
//! Files use psql's own notation, `:"schema"` for the identifier and `:'schema'` for the text, so that
//! `psql -1 -v schema=graphile_worker -f FILE` can run, prepare or explain them as they stand.

use crate::Error;
use sqlx::AssertSqlSafe;

/// PostgreSQL cuts longer names off; two schemas could then be one.
const LONGEST_NAME: usize = 63;

/// A legal name of a schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Schema(String);

impl Schema {
    pub(crate) fn new(name: &str) -> Result<Schema, Error> {
        let problem = if name.is_empty() {
            "is empty"
        } else if name.len() > LONGEST_NAME {
            "is longer than the 63 bytes that PostgreSQL keeps of a name"
        } else if name.contains('\0') {
            "contains a NUL character"
        } else if name == "$user" {
            "is what PostgreSQL's search_path takes for the name of the current role"
        } else {
            return Ok(Schema(name.to_owned()));
        };
        Err(Error::InvalidSchemaName { name: name.to_owned(), problem })
    }

    pub(crate) fn name(&self) -> &str {
        &self.0
    }

    /// The text of an SQL file for this schema.
    pub(crate) fn sql(&self, file: &'static str) -> AssertSqlSafe<String> {
        let identifier = quote_identifier(&self.0);
        let text = if self.0.contains('\\') {
            format!(" E'{}'", self.0.replace('\\', "\\\\").replace('\'', "''"))
        } else {
            format!("'{}'", self.0.replace('\'', "''"))
        };
        // Both marks are replaced in one pass, so that a name which looks like a mark stays a name.
        let mut sql = String::with_capacity(file.len() + 1024);
        let mut rest = file;
        while let Some(at) = rest.find(":\"schema\"").into_iter().chain(rest.find(":'schema'")).min() {
            sql.push_str(&rest[..at]);
            sql.push_str(if rest[at..].starts_with(":\"") { &identifier } else { &text });
            rest = &rest[at + ":'schema'".len()..];
        }
        sql.push_str(rest);
        AssertSqlSafe(sql)
    }
}

pub(crate) fn quote_identifier(name: &str) -> String {
    format!("\"{}\"", name.replace('"', "\"\""))
}

/// The statements, one a file.
pub(crate) mod queries {
    pub(crate) const INSTALLATION: &str = include_str!("../sql/queries/installation.sql");
    pub(crate) const LOCK_LEDGER: &str = include_str!("../sql/queries/lock_ledger.sql");
    pub(crate) const LEDGER: &str = include_str!("../sql/queries/ledger.sql");
    pub(crate) const ADDITIONS: &str = include_str!("../sql/queries/additions.sql");
    pub(crate) const FUNCTIONS_CHECKSUM: &str = include_str!("../sql/queries/functions_checksum.sql");
    pub(crate) const RECORD_FUNCTIONS: &str = include_str!("../sql/queries/record_functions.sql");
    pub(crate) const COUNT_JOBS: &str = include_str!("../sql/queries/count_jobs.sql");
    pub(crate) const CONTRACT_DIFFERENCES: &str = include_str!("../sql/queries/contract_differences.sql");
    pub(crate) const OLD_LAYOUT_LOCKS: &str = include_str!("../sql/queries/old_layout_locks.sql");
}

/// What gets installed, in the order of the numbers; `migrate` decides which of them.
pub(crate) mod schema {
    pub(crate) const SCHEMA: &str = include_str!("../sql/schema/001-schema.sql");
    pub(crate) const LEDGER: &str = include_str!("../sql/schema/002-ledger.sql");
    pub(crate) const LEDGER_BREAKING_COLUMN: &str = include_str!("../sql/schema/003-ledger-breaking-column.sql");
    pub(crate) const TABLES: &str = include_str!("../sql/schema/010-tables.sql");
    pub(crate) const VIEW: &str = include_str!("../sql/schema/011-view.sql");
    pub(crate) const LEFTOVERS: &str = include_str!("../sql/schema/012-leftovers.sql");
    pub(crate) const LEDGER_ENTRIES: &str = include_str!("../sql/schema/020-ledger-entries.sql");
    pub(crate) const LEDGER_FLAGS: &str = include_str!("../sql/schema/021-ledger-flags.sql");
    pub(crate) const ADDITIONS: &str = include_str!("../sql/schema/100-additions.sql");
    pub(crate) const FUNCTIONS: &str = include_str!("../sql/schema/110-functions.sql");
    pub(crate) const OLD_LAYOUT_SET_ASIDE: &str = include_str!("../sql/schema/900-old-layout-set-aside.sql");
    pub(crate) const OLD_LAYOUT_BY_NAME: &str = include_str!("../sql/schema/901-old-layout-by-name.sql");
    pub(crate) const OLD_LAYOUT_BY_ID: &str = include_str!("../sql/schema/902-old-layout-by-id.sql");
    pub(crate) const OLD_LAYOUT_BRING_IN: &str = include_str!("../sql/schema/910-old-layout-bring-in.sql");
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sql(schema: &str, file: &'static str) -> String {
        Schema::new(schema).expect("a legal name").sql(file).0
    }

    #[test]
    fn a_schema_name_is_quoted_wherever_it_stands() {
        assert_eq!(sql("plain", r#"from :"schema".jobs"#), r#"from "plain".jobs"#);
        assert_eq!(sql(r#"it's "mine""#, r#":"schema" :'schema'"#), r#""it's ""mine""" 'it''s "mine"'"#);
        assert_eq!(sql(r"back\slash", r#":"schema" :'schema'"#), r#""back\slash"  E'back\\slash'"#);
    }

    #[test]
    fn a_schema_name_that_looks_like_a_placeholder_is_left_alone() {
        assert_eq!(sql(":'schema'", r#"a :"schema" b"#), r#"a ":'schema'" b"#);
    }

    #[test]
    fn a_name_that_postgresql_would_change_is_refused() {
        for (name, problem) in
            [("", "is empty"), ("a\0b", "NUL"), ("$user", "current role"), (&"x".repeat(64), "63 bytes")]
        {
            let message = Schema::new(name).expect_err("not a legal name").to_string();
            assert!(message.contains(problem), "{message}");
        }
        assert!(Schema::new(&"x".repeat(63)).is_ok());
    }
}
