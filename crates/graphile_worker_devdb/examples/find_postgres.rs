//! Prints which PostgreSQL would be used. Exits with 3 if none is installed, and with 1 on any other error.

use graphile_worker_devdb::{Error, Programs};
use std::process::ExitCode;

fn main() -> ExitCode {
    match Programs::find() {
        Ok(programs) => {
            println!("PostgreSQL {} in {}", programs.major(), programs.bin().display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            if matches!(error, Error::NotInstalled) { ExitCode::from(3) } else { ExitCode::FAILURE }
        }
    }
}
