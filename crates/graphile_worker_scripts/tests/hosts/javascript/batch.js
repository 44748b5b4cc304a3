module.exports = (numbers) =>
  numbers.map(async (number) => {
    if (number % 2 === 1) throw new Error("odd");
  });
