//! Progress of a scenario: a bar on a terminal, lines elsewhere.

use indicatif::{ProgressBar, ProgressStyle};
use std::time::Duration;

/// The steps of one scenario.
pub(crate) struct Progress {
    title: String,
    bar: ProgressBar,
}

impl Progress {
    pub(crate) fn new(title: &str, steps: usize) -> Progress {
        let bar = ProgressBar::new(steps as u64).with_prefix(title.to_owned());
        let template = "{prefix:<26.bold} {wide_bar:.cyan/dim} {pos:>3}/{len} {elapsed:>5} {msg:<22!}";
        if let Ok(style) = ProgressStyle::with_template(template) {
            bar.set_style(style.progress_chars("━━─"));
        }
        bar.enable_steady_tick(Duration::from_millis(200));
        Progress { title: title.to_owned(), bar }
    }

    /// Shows the step that starts.
    pub(crate) fn begin(&self, step: &str) {
        self.bar.set_message(step.to_owned());
    }

    /// Prints the result of the step.
    pub(crate) fn end(&self, result: &str) {
        let step = self.bar.message();
        if self.bar.is_hidden() {
            eprintln!("{} · {step}: {result}", self.title);
        } else {
            self.bar.println(format!("  {step}: {result}"));
        }
        self.bar.inc(1);
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_with_message("done");
    }
}
