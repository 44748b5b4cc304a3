//! The results: results.json holds the last results of every scenario. The plots, and the part of RESULTS.md between
//! two markers, are generated from it. A run of some scenarios replaces only theirs, and text written by hand stays.

use crate::Failure;
use crate::plot::Plot;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use comfy_table::{CellAlignment, Table};
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};

const BEGIN: &str = "<!-- Written by `make bench`, from here: -->";
const END: &str = "<!-- to here. -->";

/// The results of one scenario.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Section {
    /// Its position in the file.
    pub(crate) order: usize,
    pub(crate) title: String,
    /// How it was measured.
    pub(crate) method: String,
    pub(crate) header: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
    /// More tables.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) details: Vec<Details>,
    pub(crate) plots: Vec<Plot>,
    pub(crate) goals: Vec<Goal>,
    /// The machine, the versions and the date.
    pub(crate) measured: String,
}

/// A further table.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Details {
    pub(crate) caption: String,
    pub(crate) header: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
}

/// A goal and whether it was met.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Goal {
    pub(crate) what: String,
    pub(crate) wanted: String,
    pub(crate) figure: String,
    pub(crate) met: bool,
}

impl Goal {
    pub(crate) fn at_least(what: &str, wanted: f64, found: f64, write: impl Fn(f64) -> String) -> Goal {
        Goal {
            what: what.to_owned(),
            wanted: format!("≥ {}", write(wanted)),
            figure: write(found),
            met: found >= wanted,
        }
    }

    pub(crate) fn at_most(what: &str, wanted: f64, found: f64, write: impl Fn(f64) -> String) -> Goal {
        Goal {
            what: what.to_owned(),
            wanted: format!("≤ {}", write(wanted)),
            figure: write(found),
            met: found <= wanted,
        }
    }

    fn verdict(&self) -> &'static str {
        if self.met { "met" } else { "**not met**" }
    }
}

impl Section {
    fn markdown(&self) -> String {
        let mut text = format!("### {}\n\n{}\n\n", self.title, self.method);
        text += &markdown_table(&self.header, &self.rows);
        for Details { caption, header, rows } in &self.details {
            text += &format!("\n{caption}\n\n{}", markdown_table(header, rows));
        }
        for plot in &self.plots {
            text += &format!("\n![{}](plots/{}.svg)\n", plot.title, plot.name);
        }
        text + &format!("\n*{}*\n", self.measured)
    }
}

/// The results folder, and the results of this run.
pub(crate) struct Report {
    folder: PathBuf,
    measured: String,
    sections: Vec<Section>,
    new: Vec<Section>,
}

impl Report {
    pub(crate) fn open(folder: &Path, measured: String) -> Result<Report, Failure> {
        fs::create_dir_all(folder.join("plots"))?;
        let sections = match fs::read_to_string(folder.join("results.json")) {
            Ok(text) => serde_json::from_str(&text)?,
            Err(_) => Vec::new(),
        };
        Ok(Report { folder: folder.to_owned(), measured, sections, new: Vec::new() })
    }

    /// Writes the files after each scenario, so that an interrupted run keeps its results.
    pub(crate) fn keep(&mut self, section: Section) -> Result<(), Failure> {
        let section = Section { measured: self.measured.clone(), ..section };
        for plot in &section.plots {
            fs::write(self.folder.join("plots").join(format!("{}.svg", plot.name)), plot.svg())?;
        }
        // Match by title, because the position changes when a scenario is added.
        self.sections.retain(|earlier| earlier.title != section.title);
        self.sections.push(section.clone());
        self.sections.sort_by_key(|section| section.order);
        self.new.push(section);
        fs::write(self.folder.join("results.json"), serde_json::to_string_pretty(&self.sections)? + "\n")?;
        let path = self.folder.join("RESULTS.md");
        let before = fs::read_to_string(&path).unwrap_or_else(|_| "# What was measured\n".to_owned());
        Ok(fs::write(&path, replaced(&before, &generated(&self.sections)))?)
    }

    /// Prints the results of this run, and whether the goals are met.
    pub(crate) fn print(&self) {
        for section in &self.new {
            println!("\n{}\n{}", section.title, figures_table(&section.header, &section.rows));
            for Details { caption, header, rows } in &section.details {
                println!("\n{caption}\n{}", figures_table(header, rows));
            }
        }
        let header = ["must reach", "wanted", "figure", ""].map(str::to_owned);
        let mut table = new_table(&header);
        for goal in self.new.iter().flat_map(|section| &section.goals) {
            let verdict = if goal.met { "met" } else { "NOT MET" };
            table.add_row([&goal.what, &goal.wanted, &goal.figure, verdict]);
        }
        println!("\n{table}\n\n{}\nWritten to {}", self.measured, self.folder.join("RESULTS.md").display());
    }
}

fn new_table(header: &[String]) -> Table {
    let mut table = Table::new();
    table.load_style(UTF8_FULL_CONDENSED).set_header(header);
    table
}

/// A table with numbers in all columns but the first.
fn figures_table(header: &[String], rows: &[Vec<String>]) -> Table {
    let mut table = new_table(header);
    for row in rows {
        table.add_row(row);
    }
    for column in table.column_iter_mut().skip(1) {
        column.set_cell_alignment(CellAlignment::Right);
    }
    table
}

fn generated(sections: &[Section]) -> String {
    let header = ["must reach", "wanted", "figure", ""].map(str::to_owned);
    let goals: Vec<Vec<String>> = sections
        .iter()
        .flat_map(|section| &section.goals)
        .map(|goal| vec![goal.what.clone(), goal.wanted.clone(), goal.figure.clone(), goal.verdict().to_owned()])
        .collect();
    let mut text = format!("## Beside the limit and the peers\n\n{}", markdown_table(&header, &goals));
    for section in sections {
        text += &format!("\n{}", section.markdown());
    }
    text
}

fn markdown_table(header: &[String], rows: &[Vec<String>]) -> String {
    let line = |cells: &[String]| format!("| {} |\n", cells.join(" | "));
    let rule = vec!["---".to_owned(); header.len()];
    line(header) + &line(&rule) + &rows.iter().map(|row| line(row)).collect::<String>()
}

/// Replaces the text between the markers, or appends it with markers if there are none.
fn replaced(file: &str, generated: &str) -> String {
    let (before, rest) = file.split_once(BEGIN).unwrap_or((file, ""));
    let after = rest.split_once(END).map_or("", |(_, after)| after);
    let gap = if before.is_empty() || before.ends_with("\n\n") { "" } else { "\n" };
    let after = if after.is_empty() { "\n" } else { after };
    format!("{before}{gap}{BEGIN}\n\n{generated}\n{END}{after}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_text_between_the_markers_is_replaced() {
        let first = replaced("# By hand\n", "one\n");
        assert_eq!(first, format!("# By hand\n\n{BEGIN}\n\none\n\n{END}\n"));
        let second = replaced(&format!("{first}\nMore by hand\n"), "two\n");
        assert_eq!(second, format!("# By hand\n\n{BEGIN}\n\ntwo\n\n{END}\n\nMore by hand\n"));
    }

    #[test]
    fn a_goal_is_met_on_the_line() {
        assert!(Goal::at_least("a", 2.0, 2.0, |value| value.to_string()).met);
        assert!(!Goal::at_most("a", 2.0, 2.1, |value| value.to_string()).met);
    }
}
