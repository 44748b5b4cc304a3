// Writes down what a task saw, for the test to compare.
module.exports = ({ query }, task, value) => query("insert into noted (task, value) values ($1, $2)", [task, JSON.stringify(value)]);
