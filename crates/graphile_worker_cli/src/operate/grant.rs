//! `grant`: prints or runs the SQL that lets a role add, run or read jobs. The library writes the SQL.

use crate::connection::Database;
use crate::failure::Failure;
use crate::output::{print, print_line};
use clap::Args;
use graphile_worker::{RoleRight, WorkerUtils, grant_sql, revoke_sql};

/// Options of `grant`.
#[derive(Debug, Args)]
#[command(group = clap::ArgGroup::new("rights").required(true).multiple(true).args(["add", "run", "read", "revoke"]))]
pub(crate) struct Grant {
    /// Role; it must exist
    #[arg(value_name = "ROLE")]
    role: String,
    /// Let the role add jobs, and nothing else; it cannot read payloads
    #[arg(long)]
    add: bool,
    /// Let the role run jobs as a worker does, and change them as an operator does
    #[arg(long)]
    run: bool,
    /// Let the role read everything, including payloads, and change nothing
    #[arg(long)]
    read: bool,
    /// Revoke all rights on the schema from the role
    #[arg(long, conflicts_with_all = ["add", "run", "read"])]
    revoke: bool,
    /// Run the SQL instead of printing it; connect as the owner of the schema
    #[arg(long)]
    apply: bool,
}

impl Grant {
    /// Whether the command only prints SQL and needs no database.
    pub(crate) fn only_prints(&self) -> bool {
        !self.apply
    }

    fn rights(&self) -> Vec<RoleRight> {
        let rights = [(self.add, RoleRight::Add), (self.run, RoleRight::Run), (self.read, RoleRight::Read)];
        rights.into_iter().filter_map(|(wanted, right)| wanted.then_some(right)).collect()
    }

    /// Prints the SQL, for `psql` or the application's own migrations.
    pub(crate) fn print(&self, schema: &str) -> Result<(), Failure> {
        let sql =
            if self.revoke { revoke_sql(schema, &self.role) } else { grant_sql(schema, &self.role, &self.rights()) };
        print(&format!("begin;\n{}commit;\n", sql?))
    }
}

pub(super) async fn grant(args: Grant, database: &Database) -> Result<(), Failure> {
    if args.only_prints() {
        return args.print(database.schema());
    }
    let utils = WorkerUtils::new(database.pool(1).await?, database.schema());
    let (role, schema) = (&args.role, database.schema());
    if args.revoke {
        utils.revoke(role).await?;
        return print_line(&format!("role {role:?} no longer has rights on schema {schema:?}"));
    }
    let rights = args.rights();
    utils.grant(role, &rights).await?;
    let can = rights.iter().map(|right| match right {
        RoleRight::Add => "add jobs",
        RoleRight::Run => "run jobs",
        _ => "read jobs",
    });
    let can = can.collect::<Vec<_>>().join(" and ");
    print_line(&format!("role {role:?} can {can} in schema {schema:?}"))
}
