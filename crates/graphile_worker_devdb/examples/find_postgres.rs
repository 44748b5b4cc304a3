//! Prints which PostgreSQL would be used, or how to install one.

use graphile_worker_devdb::Programs;
use std::process::ExitCode;

fn main() -> ExitCode {
    match Programs::find() {
        Ok(programs) => {
            println!("PostgreSQL {} in {}", programs.major(), programs.bin().display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
