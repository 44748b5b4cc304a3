//! Rights for roles that do not own the schema: adding jobs, running them, or only reading. The SQL is in
//! `sql/roles`.

use crate::Error;
use crate::db::{Schema, session};
use crate::error::Context;
use sqlx::{AssertSqlSafe, PgPool};

/// The scripts, one per right.
mod sql {
    pub(super) const ADD: &str = include_str!("../../sql/roles/add.sql");
    pub(super) const RUN: &str = include_str!("../../sql/roles/run.sql");
    pub(super) const READ: &str = include_str!("../../sql/roles/read.sql");
    pub(super) const REVOKE: &str = include_str!("../../sql/roles/revoke.sql");
}

/// PostgreSQL truncates longer names.
const LONGEST_NAME: usize = 63;

/// How long a grant waits for transactions that use the tables. Meanwhile all other sessions wait behind it.
const LOCK_TIMEOUT: &str = "set local lock_timeout = '5s'";

/// A right of a role. Row security stays on: each right comes with the policies and functions it needs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum RoleRight {
    /// Add jobs with `add_job` and `add_jobs`, nothing else. Does not allow reading payloads.
    Add,
    /// Everything that a worker, and an operator, does with jobs.
    Run,
    /// Read everything, including payloads. Change nothing.
    Read,
}

/// Returns the SQL that grants these rights to a role. The schema's owner must run it in one transaction.
///
/// ```
/// use graphile_worker::{RoleRight, grant_sql};
///
/// let sql = grant_sql("graphile_worker", "web", &[RoleRight::Add])?;
/// assert!(sql.contains("grant usage on schema \"graphile_worker\" to \"web\";"));
/// # Ok::<(), graphile_worker::Error>(())
/// ```
pub fn grant_sql(schema: &str, role: &str, rights: &[RoleRight]) -> Result<String, Error> {
    let file = |right: &RoleRight| match right {
        RoleRight::Add => sql::ADD,
        RoleRight::Run => sql::RUN,
        RoleRight::Read => sql::READ,
    };
    scripts(schema, role, rights.iter().map(file))
}

/// Returns the SQL that revokes all rights of a role on the schema.
pub fn revoke_sql(schema: &str, role: &str) -> Result<String, Error> {
    scripts(schema, role, [sql::REVOKE])
}

fn scripts(schema: &str, role: &str, files: impl IntoIterator<Item = &'static str>) -> Result<String, Error> {
    let schema = Schema::new(schema)?;
    let problem = match role {
        "" => Some("is empty"),
        "public" | "none" => Some("must be the name of a role: `public` and `none` are keywords"),
        role if role.contains('\0') => Some("contains a NUL character"),
        role if role.len() > LONGEST_NAME => Some("is longer than 63 bytes, PostgreSQL's limit for names"),
        _ => None,
    };
    if let Some(problem) = problem {
        return Err(Error::InvalidOption { setting: "role", problem: problem.to_owned() });
    }
    let (read_policy, run_policy) = (policy("_rs_read_", role), policy("_rs_run_", role));
    let script = |file| schema.sql_for_role(file, role, &read_policy, &run_policy);
    Ok(files.into_iter().map(script).collect::<Vec<_>>().join("\n"))
}

/// One policy per role, so that the rights of one role can be revoked without touching the others.
fn policy(prefix: &str, role: &str) -> String {
    let name = format!("{prefix}{role}");
    if name.len() <= LONGEST_NAME {
        return name;
    }
    // FNV-1a: must be the same in every release.
    let hash = role
        .bytes()
        .fold(0xcbf2_9ce4_8422_2325_u64, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3));
    format!("{}_{hash:016x}", &name[..name.floor_char_boundary(LONGEST_NAME - 17)])
}

/// Runs the SQL of a grant or revocation in one transaction.
pub(crate) async fn apply(pool: &PgPool, sql: String, context: impl Fn() -> String) -> Result<(), Error> {
    let mut transaction = pool.begin_with(session::BEGIN).await.context(&context)?;
    sqlx::raw_sql(LOCK_TIMEOUT).execute(&mut *transaction).await.context(&context)?;
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(&mut *transaction).await.context(&context)?;
    transaction.commit().await.context(&context)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_and_never_longer_than_63_bytes() {
        let sql = grant_sql("it's", "a \"web\"", &[RoleRight::Add, RoleRight::Read]).expect("SQL");
        assert!(sql.contains(r#"grant usage on schema "it's" to "a ""web""";"#), "{sql}");
        assert!(!sql.contains(":\""), "{sql}");
        let (long, other) = ("é".repeat(31) + "a", "é".repeat(31) + "b");
        assert!(policy("_rs_read_", &long).len() <= LONGEST_NAME);
        assert_ne!(policy("_rs_read_", &long), policy("_rs_read_", &other));
    }

    #[test]
    fn invalid_role_names_are_rejected() {
        for role in ["", "public", "none", &"x".repeat(64), "a\0b"] {
            assert!(revoke_sql("graphile_worker", role).is_err(), "{role:?}");
        }
    }
}
