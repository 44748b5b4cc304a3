//! `doctor`: prints the library's checks of the server, the schema and the queue.

use super::{OutputFormat, print_json};
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print;
use crate::table::{Cell, Screen, Table, Tone, text};
use clap::Args;
use graphile_worker::DoctorLevel;

/// Options of `doctor`.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    #[command(flatten)]
    output: OutputFormat,
}

pub(super) async fn doctor(args: Doctor, database: &Database) -> Result<(), Failure> {
    let utils = database.utils(2).await?;
    let report = utils.doctor().await?;
    if args.output.json {
        print_json(&report)?;
    } else {
        let mut table = Table::new(&[text("level"), text("check"), text("finding and advice")]);
        for check in &report.checks {
            let tone = match check.level {
                DoctorLevel::Ok => Tone::Good,
                DoctorLevel::Advice => Tone::Careful,
                _ => Tone::Bad,
            };
            let advice = check.advice.as_ref().map(|advice| format!("\n→ {advice}")).unwrap_or_default();
            table.row([
                Cell::toned(check.level.as_str(), tone),
                check.name.replace('_', " ").into(),
                format!("{}{advice}", check.found).into(),
            ]);
        }
        print(&table.show(Screen::of_stdout()))?;
    }
    if report.level == DoctorLevel::Problem { Err(Failure::AlreadyReported) } else { Ok(()) }
}
