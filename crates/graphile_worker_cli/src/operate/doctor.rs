//! `doctor`: whether all is well, as the library's checkup found it.

use super::{Form, print_json};
use crate::connection::Database;
use crate::failure::Failure;
use crate::output::print;
use crate::table::{Cell, Screen, Table, Tone, text};
use clap::Args;
use graphile_worker::{CheckLevel, WorkerUtils};

/// For `doctor`.
#[derive(Debug, Args)]
pub(crate) struct Doctor {
    #[command(flatten)]
    form: Form,
}

pub(super) async fn doctor(asked: Doctor, database: &Database) -> Result<(), Failure> {
    let utils = WorkerUtils::new(database.pool(2).await?, database.schema());
    let checkup = utils.checkup().await?;
    if asked.form.json {
        print_json(&checkup)?;
    } else {
        let mut table = Table::new(&[text("level"), text("what"), text("found, and advice")]);
        for check in &checkup.checks {
            let tone = match check.level {
                CheckLevel::Ok => Tone::Good,
                CheckLevel::Advice => Tone::Careful,
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
    if checkup.level == CheckLevel::Problem { Err(Failure::Said) } else { Ok(()) }
}
